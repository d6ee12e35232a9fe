"""Verdicts: what is refused and why, what would do, and how the command and the schedulers' hooks say it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from importlib.resources import files

import pytest

from meshwright.contrib.gate import Limits
from meshwright.errors import InputError
from meshwright.programs import RunLength
from tests.commands import run

from .conftest import Asked
from .test_launchers import SBATCH
from .test_recipes import AXOLOTL, TITAN

FILES = {"run.sbatch": SBATCH, "job.toml": TITAN}  # 500 steps on 16 H100, at most 36 hours


def test_a_small_cost_is_said_with_its_cents(gated):
    made, _ = gated(
        FILES, Asked(step_seconds=0.01), limits=Limits(max_cost=0.01), run=RunLength(price_per_device_hour=2)
    )
    assert made.reasons == ("it costs 0.0444, and may cost 0.01",)


def test_a_job_within_its_limits_may_go(gated):
    made, _ = gated(FILES, limits=Limits(max_cost=1e6, max_days=30))
    assert (made.may_go, made.reasons, made.cures) == (True, (), ())
    assert made.line.endswith("run.sbatch on 16xH100: may go")
    assert "per H100 and hour, the list price of" in made.price_words


def test_a_job_that_costs_too_much_is_refused_with_the_steps_that_do_not(gated):
    made, _ = gated(
        FILES, Asked(step_seconds=72.0), limits=Limits(max_cost=100), run=RunLength(price_per_device_hour=2)
    )
    assert made.reasons == ("it costs 320, and may cost 100",)  # 500 x 72 s are 10 h of 16 devices
    (cure,) = made.cures
    assert (cure.change, cure.is_weighed) == ("--set steps=156", False)


def test_a_job_that_takes_too_long_is_refused(gated):
    made, _ = gated(FILES, Asked(step_seconds=216.0), limits=Limits(max_days=1))
    assert made.reasons == ("it takes 1.25 days, and may take 1",)
    assert made.cures[0].change == "--set steps=400"


def test_a_job_that_outlasts_its_own_time_limit_is_told_the_limit_that_does(gated):
    made, _ = gated(FILES, Asked(step_seconds=288.0))  # 40 h
    assert made.reasons == ("it takes 40 hours, and its own time limit is 36.0 h",)
    assert made.cures[0].change == "--time=1-16:00:00"
    pods = """
apiVersion: batch/v1
kind: Job
spec:
  activeDeadlineSeconds: 60
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      containers:
      - {command: [meshwright, train, linear, --steps, "100"], resources: {limits: {nvidia.com/gpu: 8}}}
"""
    made, _ = gated({"job.yaml": pods}, Asked(step_seconds=2.5))
    assert made.cures[0].change == "activeDeadlineSeconds: 250"


def test_a_job_that_does_not_fit_is_told_the_first_change_that_does(gated):
    asked = Asked(fitting=(False, False, True))
    made, _ = gated(FILES, asked)
    assert made.reasons[0].startswith("it does not fit: a device needs")
    (cure,) = made.cures
    assert (cure.is_weighed, asked.times) == (True, 3)
    assert cure.change == made.weighing.suggestions[1].arguments


def test_no_change_is_named_if_none_of_those_weighed_fits(gated):
    made, _ = gated(FILES, Asked(fitting=(False,)))
    assert (made.may_go, made.cures) == (False, ())
    assert "No single change was found" in str(made)


def test_a_limit_without_a_length_or_a_price_is_an_error_and_no_pass(gated):
    with pytest.raises(InputError, match="does not say how long it trains") as refused:
        gated({"lora.yaml": AXOLOTL}, on="8xH100", limits=Limits(max_days=1))
    assert "--tokens 15M" in str(refused.value)
    made, asked = gated(
        {"lora.yaml": AXOLOTL}, on="8xH100", limits=Limits(max_days=1), run=RunLength(tokens="15M")
    )
    assert made.may_go
    assert asked.config.steps == 115  # 15M of 8 x 2 x 4 x 2048 tokens
    with pytest.raises(InputError, match="no list price of CPU is known"):
        gated({"job.toml": TITAN}, on="4xCPU", limits=Limits(max_cost=1))


def test_a_recipe_alone_needs_a_fleet(gated):
    with pytest.raises(InputError, match="does not say what it runs on"):
        gated({"job.toml": TITAN})


def test_the_report_says_what_was_assumed_and_left_out(gated):
    made, _ = gated(FILES)
    text = str(made)
    assert "weighed as Meshwright's own step with the sizes and settings of torchtitan" in " ".join(
        text.split()
    )
    assert "job.dump_folder" in text
    assert made.to_dict()["launcher"]["time_limit_seconds"] == 129_600.0


SMALL = "#!/bin/bash\n#SBATCH --gpus=h100:8\n#SBATCH --time=10\nmeshwright train linear --steps 10\n"


def test_the_status_of_the_command_is_0_2_or_3(tmp_path):
    (tmp_path / "run.sh").write_text(SMALL)
    assert run("gate", "run.sh", "--max-cost", "100", folder=tmp_path).status == 0
    done = run("gate", "run.sh", "--max-cost", "1e-9", "--json", folder=tmp_path)
    assert (done.status, done.json["may_go"], done.json["fits"]) == (3, False, True)
    assert done.json["reasons"][0].startswith("it costs")
    warned = run("gate", "run.sh", "--max-cost", "1e-9", "--warn", folder=tmp_path)
    assert warned.status == 0
    assert "refused" in warned.output
    (tmp_path / "bad.sh").write_text("#!/bin/bash\n#SBATCH --wibble=1\n")
    assert run("gate", "bad.sh", folder=tmp_path).status == 2
    assert run("gate", "absent.sh", folder=tmp_path).status == 2


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{there}: &{there} [{', '.join([f'*{here}'] * 9)}]"
    for here, there in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.yaml", BOMB, "more than 32 documents, 20,000 values or 40 levels"),
        ("x.yaml", "a: " + "[" * 100 + "]" * 100, "or 40 levels"),
        ("x.yaml", "a: &a [*a]", "stands for what it is a part of"),
        ("x.yaml", "a: !!python/object/apply:os.system [touch pwned]", "is not YAML that is read"),
        ("x.yaml", "resources: {}\nrun: a\nrun: b", "is given twice"),
        ("x.yaml", "- 1\n", "holds no keys"),
        ("x.toml", "", "holds no keys"),
        ("x.yaml", "1: 2\nresources: {accelerators: H100:8}\nrun: a", "1 = 2: it is not known here"),
        ("x.yaml", "a: 1", "is no job that is read"),
        ("x.json", "[" * 100_000, "is not JSON"),
        ("x.toml", "a = ", "is not TOML"),
        ("x.sh", "x" * 300_000, "cannot be read"),
        ("x.sh", "#SBATCH --gpus=h100:1\necho 'open", "is not closed"),
        (
            "x.sh",
            "#SBATCH --gpus=h100:1\n" + "A=$A$A\n" * 3 + "touch pwned; `touch pwned`; $(touch pwned)",
            "nothing",
        ),
        ("x.sh", f"#SBATCH --gpus=h100:1\nif [ {'1' * 5000} -gt 1 ]; then a; fi", "nothing"),
        ("x.sh", "#SBATCH --gpus=h100:1\nA=" + "${B:-" * 3000 + "}" * 3000, "too deep in each other"),
        ("x.sh", f"#SBATCH --gpus=h100:1\naxolotl train {'b' * 300}.yml", "which is no file here"),
        ("x.yaml", f"base_model: gpt2\nmicro_batch_size: 1\ndeepspeed: {'d' * 300}", "is no file here"),
        ("x.toml", "training = {}\n[model]\nname = 'llama3'\nflavor = '8B'\nconverters = 3", "has '3'"),
        ("x.sh", "#SBATCH --gpus=h100:1\nA=xxxxxxxx\n" + "A=$A$A$A$A\n" * 30, "grows beyond 256 KiB"),
    ],
)
def test_a_hostile_file_is_data_and_an_error(gated, tmp_path, name, text, words):
    with pytest.raises(InputError) as refused:
        gated({name: text}, on="8xH100")
    assert words in str(refused.value)
    assert not (tmp_path / "pwned").exists()


class _Policy:
    """Stands for `sky.AdminPolicy`."""


def _request(run_text: str) -> types.SimpleNamespace:
    config = {"name": "t", "resources": {"accelerators": {"H100": 8}}, "run": run_text}
    return types.SimpleNamespace(
        task=types.SimpleNamespace(to_yaml_config=lambda: config), skypilot_config="kept"
    )


def test_the_policy_of_skypilot_refuses_and_lets_go(monkeypatch):
    sky = types.SimpleNamespace(AdminPolicy=_Policy, MutatedUserRequest=lambda task, config: (task, config))
    monkeypatch.setitem(sys.modules, "sky", sky)
    from meshwright.contrib.gate.skypilot import GatePolicy

    assert issubclass(GatePolicy, _Policy)
    train = _request("meshwright train linear --steps 10\n")
    monkeypatch.setenv("MESHWRIGHT_GATE", "--max-cost 1e-9")
    with pytest.raises(RuntimeError, match="meshwright gate: t on 8xH100: refused: it costs"):
        GatePolicy.validate_and_mutate(train)
    monkeypatch.setenv("MESHWRIGHT_GATE", "--max-cost=100 --max-days 1")
    assert GatePolicy.validate_and_mutate(train) == (train.task, "kept")
    other = _request("python serve.py\n")
    assert GatePolicy.validate_and_mutate(other) == (other.task, "kept")
    monkeypatch.setenv("MESHWRIGHT_GATE", "--strict")
    with pytest.raises(RuntimeError, match="starts nothing that is read here"):
        GatePolicy.validate_and_mutate(other)
    monkeypatch.setenv("MESHWRIGHT_GATE", "--wibble 3")
    with pytest.raises(RuntimeError, match="which is no limit"):
        GatePolicy.validate_and_mutate(train)
    monkeypatch.setenv("MESHWRIGHT_GATE", "--max-cost '3")
    with pytest.raises(RuntimeError, match="meshwright gate: MESHWRIGHT_GATE cannot be read"):
        GatePolicy.validate_and_mutate(train)


@pytest.mark.wide
def test_skypilot_itself_loads_and_applies_the_policy(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".sky").mkdir()
    name = "meshwright.contrib.gate.skypilot.GatePolicy"
    (tmp_path / ".sky" / "config.yaml").write_text(f"admin_policy: {name}\n")
    policies = pytest.importorskip("sky.utils.admin_policy_utils", reason="SkyPilot is not installed")
    import sky
    from sky.server.requests.request_names import AdminPolicyRequestName

    def applied():
        task = sky.Task(name="t", run="meshwright train linear --steps 10")
        task.set_resources(sky.Resources(labels={"a": "b"}))
        monkeypatch.setattr(task, "to_yaml_config", lambda: _request(task.run).task.to_yaml_config())
        return policies.apply(task, request_name=AdminPolicyRequestName.CLUSTER_LAUNCH)

    monkeypatch.setenv("MESHWRIGHT_GATE", "--max-cost 100")
    assert [task.name for task in applied()[0].tasks] == ["t"]
    monkeypatch.setenv("MESHWRIGHT_GATE", "--max-cost 1e-9")
    with pytest.raises(sky.exceptions.UserRequestRejectedByPolicy, match="refused: it costs"):
        applied()


FILTER = files("meshwright.contrib.gate") / "cli_filter.lua"
CALLED = """
slurm = {SUCCESS = 0, ERROR = -1, json_cli_options = function(o) return '{"nodes": "2"}' end,
         log_error = function(text) print("error: " .. text) end, log_info = print}
dofile(arg[1])
local options = {type = arg[2], gres = arg[3] ~= "" and arg[3] or nil, argv = {arg[4]}, wrap = arg[5]}
print(slurm_cli_pre_submit(options, 0))
"""
STUB = """#!/bin/sh
for word in "$@"; do echo "word: $word"; done
grep -q trains "$2" && exit {status}
exit 2
"""


def test_the_filter_of_slurm_ships_with_the_package():
    text = FILTER.read_text("utf-8")
    for name in ("slurm_cli_setup_defaults", "slurm_cli_pre_submit", "slurm_cli_post_submit"):
        assert f"function {name}(" in text


@pytest.mark.parametrize(
    ("status", "limits", "job", "last", "words"),
    [
        (0, "", ("sbatch", "gpu:8", "it's a job"), "0", ""),
        (
            3,
            "--max-cost 9",
            ("sbatch", "gpu:8", "it's a job"),
            "-1",
            "error: meshwright gate refused it's a job",
        ),
        (3, "", ("sbatch", "gpu:8", None, "trains it"), "-1", "refused the command"),
        (3, "", ("sbatch", "gpu:8", "other.sh"), "0", "did not weigh it: word: gate"),
        (3, "--strict", ("sbatch", "gpu:8", "other.sh"), "-1", "refused other.sh"),
        (3, "--strict", ("sbatch", "", "it's a job"), "0", ""),  # it asks for no device
        (3, "", ("srun", "gpu:8", "it's a job"), "0", ""),
        (3, "--strict", ("sbatch", "gpu:8", None), "0", ""),  # a script from sbatch's input
    ],
)
@pytest.mark.parametrize("lua", ["lua5.1", "lua5.4"])
def test_the_filter_of_slurm_refuses_and_lets_go(tmp_path, lua, status, limits, job, last, words):
    if (program := shutil.which(lua)) is None:
        pytest.skip(f"{lua} is not installed")
    (tmp_path / "it's a job").write_text("trains it\n")
    (tmp_path / "other.sh").write_text("hostname\n")
    (tmp_path / "meshwright").write_text(STUB.format(status=status))
    (tmp_path / "meshwright").chmod(0o755)
    (tmp_path / "called.lua").write_text(CALLED)
    kind, devices, script, *wrapped = job
    arguments = [kind, devices, script] if script else [kind, devices]
    call = f"arg[4] = nil; arg[5] = {wrapped[0]!r};" if wrapped else ""
    (tmp_path / "called.lua").write_text(call + CALLED)
    done = subprocess.run(
        [program, "called.lua", str(FILTER), *arguments],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MESHWRIGHT_GATE": limits},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == last
    assert words in done.stdout
    if limits.startswith("--max"):
        assert done.stderr.splitlines()[-2:] == ["word: --max-cost", "word: 9"]
        assert 'word: {"nodes": "2"}' in done.stderr
