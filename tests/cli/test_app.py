from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from meshwright.cli import app_for
from tests import commands

VERBS = ["weigh", "train", "sample", "export", "probe", "presets", "fleets", "formats", "doctor"]
VERBS += ["init", "sweep"]
HEAVY = ("jax", "jaxlib", "numpy", "matplotlib", "psutil", "pydantic", "optax")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


HELP = """
import sys
from meshwright.cli import main
sys.argv = ["meshwright", *{arguments!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print({heavy!r} and sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr)
"""


def test_help_names_every_verb_and_loads_nothing_heavy():
    done = python(HELP.format(arguments=["--help"], heavy=HEAVY))
    assert done.stderr.splitlines() == ["[]"]
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["presets"],
        ["fleets", "h100"],
        *(pytest.param([verb], marks=pytest.mark.wide) for verb in ("fleets", "formats")),
    ],
)
def test_what_only_reads_catalogs_loads_no_jax(arguments: list[str]):
    done = python(HELP.format(arguments=arguments, heavy=("jax", "jaxlib", "matplotlib")))
    assert done.stderr.splitlines()[0] == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(meshwright, verb: str):
    done = meshwright(verb, "--help")
    assert done.status == 0
    assert "--json" in done.output


@pytest.mark.parametrize(
    "verb", [[verb] for verb in VERBS] + [["data", "tokenize"], ["data", "sample-images"]]
)
def test_the_help_of_every_verb_has_an_example_that_parses(meshwright, verb: list[str]):
    lines = meshwright(*verb, "--help").output.splitlines()
    (start,) = [
        number for number, line in enumerate(lines) if line.strip().startswith("Example: meshwright ")
    ]
    words = shlex.split(" ".join(line.strip() for line in lines[start:]))[2:]
    assert words[: len(verb)] == verb
    command = typer.main.get_command(app_for(verb))
    for name in verb:
        command = command.commands[name]  # pyright: ignore
    command.make_context(verb[-1], words[len(verb) :])  # raises where it does not parse


def test_the_version_is_that_of_the_package(meshwright):
    assert meshwright("--version").output == f"meshwright {version('meshwright')}\n"


def test_a_shell_completes_verbs_presets_files_and_runs(tmp_path: Path):
    (tmp_path / "lla.toml").touch()
    (tmp_path / "runs/first").mkdir(parents=True)

    def completed(words: str) -> list[str]:
        wanted = {"_MESHWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
        if words.count(" ") < 2:
            wanted["COMP_CWORD"] = "1"
        code = "from meshwright.cli import main; import sys; sys.argv = ['meshwright']; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **wanted},
        )
        assert not done.stderr
        return done.stdout.split()

    assert completed("meshwright we") == ["weigh"]
    assert completed("meshwright weigh lla") == ["llama-1b", "llama2-7b", "llama3-405b", "llama3-70b",
                                                 "llama3-8b", "lla.toml"]  # fmt: skip
    assert completed("meshwright train runs") == ["runs/first"]


def test_what_an_alias_was_read_as_is_said_before_the_work(meshwright):
    done = meshwright("weigh", "no-preset", "--on", "8x4090", "--layout", "dp=8", "--json")
    assert done.output == ""
    assert done.talk.splitlines()[:3] == [
        "note: fleet '8x4090' read as 8xRTX-4090",
        "note: layout 'dp=8' read as data=8",
        "error: no preset is named 'no-preset'",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["weigh"],
        ["weigh", "linear"],
        ["weigh", "linear", "--on", "1xCPU", "--what"],
        ["wiegh"],
        ["train", "linear", "--steps", "0"],
        ["train", "linear", "--steps", "many"],
    ],
)
def test_wrong_usage_is_the_users_input(meshwright, arguments: list[str]):
    done = meshwright(*arguments)
    assert done.status == 2
    assert not done.output
    assert "Traceback" not in done.talk


def test_no_arguments_show_the_help(meshwright):
    done = meshwright()
    assert "Usage" in done.output + done.talk


def test_an_error_is_two_lines_without_a_traceback(meshwright):
    done = meshwright("weigh", "llama3-8", "--on", "8xH100", "--json")
    assert (done.status, done.output) == (2, "")
    assert done.talk == (
        "error: no preset is named 'llama3-8'\n"
        "hint: did you mean 'llama3-8b'? (a file's path ends in .toml)\n"
    )


def test_a_failure_that_is_not_the_users_exits_with_1(meshwright, monkeypatch):
    from meshwright.errors import CompileError

    def fail(*_: object, **__: object) -> None:
        raise CompileError("the compiler ended", hint="see its words")

    monkeypatch.setattr("meshwright.weigh", fail)
    done = meshwright("weigh", "linear", "--on", "1xCPU")
    assert (done.status, done.talk) == (1, "error: the compiler ended\nhint: see its words\n")


def test_a_bug_keeps_its_traceback_and_exits_with_4(meshwright, monkeypatch):

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("meshwright.weigh", fail)
    done = meshwright("weigh", "linear", "--on", "1xCPU")
    assert done.status == 4
    assert done.talk.startswith("Traceback (most recent call last)")
    assert done.talk.endswith("AssertionError: a bug\n")


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "meshwright", "formats", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("{")


def test_a_reader_that_stops_reading_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m meshwright fleets --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


def test_output_in_a_pipe_has_no_colour():
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "fleets"],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "COLUMNS"},
    )
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100


JAX_WITHOUT_A_PLATFORM = """
from meshwright import plugins
plugins.NVIDIA_DEVICES = {devices!r}
import jax, logging
jax.devices()
plugin = "Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda13.initialize()"
try:
    raise RuntimeError("Unable to load cuFFT. Is it installed?")
except RuntimeError:
    logging.getLogger("jax._src.xla_bridge").exception(plugin)
logging.getLogger("jax._src.xla_bridge").warning("another warning")
"""


@pytest.mark.parametrize("devices", [(), ("/dev/null",)], ids=["no GPU", "a GPU"])
def test_a_cuda_plugin_that_cannot_start_prints_no_traceback(devices: tuple[str, ...]):
    """JAX logs its plugin's error with a traceback; it matters only where a GPU stays unused."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    code = JAX_WITHOUT_A_PLATFORM.format(devices=devices)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "another warning" in done.stderr
    told = "warning: JAX cannot use the NVIDIA GPU of this machine: Unable to load cuFFT."
    assert (told in done.stderr) is bool(devices)


def test_training_prints_no_traceback_where_no_platform_is_named(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = ["train", "linear", "--on", "1xCPU", "--steps", "1", "--folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


IN_A_CALLBACK = """
import gc, signal, sys, time
from meshwright.cli import _app

def pressed(phase, info):
    gc.callbacks.remove(pressed)
    signal.raise_signal(signal.SIGINT)

def command(prog_name):
    gc.callbacks.append(pressed)
    gc.collect()
    print("went on")
    try:
        time.sleep(20)
    except KeyboardInterrupt:
        sys.exit(130)

_app.app_for = lambda words: command
_app.main()
"""


def test_ctrl_c_in_a_callback_of_the_collector_whose_exceptions_python_ignores_is_not_lost():
    done = python(IN_A_CALLBACK)
    assert (done.returncode, done.stdout, done.stderr) == (130, "went on\n", "")


def test_ctrl_c_while_rates_are_measured_says_so(tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))  # no rates are kept there
    monkeypatch.setattr("meshwright.measure._kept_calibration.subprocess.run", stop)
    done = commands.run("weigh", "linear", "--on", "1xCPU")
    assert done.status == 130
    assert "stopped while this machine's rates were measured" in done.talk
