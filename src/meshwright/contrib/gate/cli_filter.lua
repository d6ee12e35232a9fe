-- Gate jobs of sbatch by Meshwright, before they are submitted. Slurm reads this file where slurm.conf has
-- CliFilterPlugins=lua. MESHWRIGHT_GATE in the environment holds the limits: "--max-cost 5000 --max-days 7".
-- Only status 3 refuses a job: what cannot be read goes, since most jobs train nothing.

local function quoted(text)
   return "'" .. text:gsub("'", "'\\''") .. "'"
end

function slurm_cli_setup_defaults(options, early)
   return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
   local script = options["argv"][1]
   if script == nil or not script:match("%.s[a-z]*$") then
      return slurm.SUCCESS
   end
   local command = "meshwright gate " .. quoted(script)
      .. " --sbatch-options " .. quoted(slurm.json_cli_options(options) or "{}")
      .. " " .. (os.getenv("MESHWRIGHT_GATE") or "") .. " 1>&2"
   local first, how, code = os.execute(command)
   -- Lua 5.1 returns the status of wait, later ones whether it went well, "exit" and the status.
   local status = type(first) == "number" and math.floor(first / 256) or code
   if status == 3 then
      slurm.log_error("meshwright gate refused " .. script)
      return slurm.ERROR
   end
   return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
   return slurm.SUCCESS
end
