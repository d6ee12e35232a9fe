-- Gate jobs of sbatch by Meshwright, before they are submitted. Slurm reads this file where slurm.conf has
-- CliFilterPlugins=lua. MESHWRIGHT_GATE in the environment holds the limits: "--max-cost 5000 --max-days 7".
-- A job that is refused does not go. One that cannot be read goes, unless they have --strict. Jobs that ask for no
-- devices are not looked at, and neither are scripts that sbatch reads from its input.

local DEVICES = {"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"}

local function quoted(text)
   return "'" .. text:gsub("'", "'\\''") .. "'"
end

local function asks_for_devices(options)
   for _, name in ipairs(DEVICES) do
      if options[name] ~= nil then
         return true
      end
   end
   return false
end

-- Return the exit status of a command and what it wrote.
local function run(command)
   local file = os.tmpname()
   local first, _, code = os.execute(command .. " >" .. quoted(file) .. " 2>&1")
   local read = io.open(file)
   local text = read and read:read("*a") or ""
   if read then
      read:close()
   end
   os.remove(file)
   -- Lua 5.1 returns the status of wait, later ones whether it went well, "exit" and the status.
   return type(first) == "number" and math.floor(first / 256) or code, text
end

function slurm_cli_setup_defaults(options, early)
   return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
   if options["type"] ~= "sbatch" or not asks_for_devices(options) then
      return slurm.SUCCESS
   end
   local script, wrapped = options["argv"][1], nil
   if script == nil and options["wrap"] ~= nil then
      wrapped = os.tmpname()
      local file = io.open(wrapped, "w")
      file:write("#!/bin/sh\n#SBATCH --job-name=wrap\n" .. options["wrap"] .. "\n")
      file:close()
   end
   if script == nil and wrapped == nil then
      return slurm.SUCCESS
   end
   local limits, strict = (os.getenv("MESHWRIGHT_GATE") or ""):gsub("%-%-strict", "")
   local status, text = run("meshwright gate " .. quoted(wrapped or script)
      .. " --sbatch-options " .. quoted(slurm.json_cli_options(options) or "no JSON of Slurm") .. " " .. limits)
   if wrapped then
      os.remove(wrapped)
   end
   if status == 3 or (status ~= 0 and strict > 0) then
      io.stderr:write(text)
      slurm.log_error("meshwright gate refused " .. (script or "the command"))
      return slurm.ERROR
   end
   if status ~= 0 then
      slurm.log_info("meshwright gate did not weigh it: " .. (text:match("[^\n]+") or "no words"):sub(1, 300))
   end
   return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
   return slurm.SUCCESS
end
