"""Rules that hold for the project as a whole: its tree, what its files may name, its start."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files_of_the_project() -> Iterator[Path]:
    """What is kept in git, found without git so that an unpacked archive can be tested too."""
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git")
    for folder in (".ci", ".github", "benchmarks", "docs", "examples", "requirements", "src", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def test_no_file_names_a_place_on_some_machine_or_a_package_index():
    places = rb"/work/|/root/|/opt/pypi|pythonhosted\.org|(?<!no-emit-)index-url|find-links"
    found = [
        f"{name_of(path)}: {place.decode()}"
        for path in files_of_the_project()
        for place in re.findall(places, path.read_bytes())
        if path != Path(__file__)
    ]
    assert not found


@pytest.mark.parametrize("lock", LOCKS, ids=name_of)
def test_a_lock_holds_exact_versions_and_nothing_else(lock: Path):
    entries = [line for line in lock.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert entries
    assert [line for line in entries if not re.fullmatch(r"[a-z0-9._-]+==[0-9][\w.+!]*", line)] == []


def pinned(lock: Path) -> dict[str, str]:
    lines = [line.split("==") for line in lock.read_text().splitlines() if "==" in line]
    return {name: version for name, version in lines}


@pytest.mark.parametrize("minor", ["311", "312", "313"])
def test_what_tests_adds_to_what_runs_which_has_one_jax_and_no_library_of_nvidias(minor: str):
    runs, tests = (pinned(ROOT / f"requirements/{kind}py{minor}.txt") for kind in ("", "test-"))
    assert runs.items() < tests.items()
    assert len({runs[name] for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")}) == 1
    assert not [name for name in tests if name.startswith("nvidia-")]
    assert not {"pytest", "pyright", "ruff", "keras", "scikit-learn", "pyarrow"} & runs.keys()


def test_what_is_installed_beside_a_lock_repeats_nothing_of_it():
    beside = pinned(ROOT / "requirements/torch-py311.txt")
    assert beside
    assert not beside.keys() & pinned(ROOT / "requirements/test-py311.txt").keys()


def test_what_makes_the_site_repeats_nothing_that_runs_and_has_the_versions_of_what_tests():
    site = pinned(ROOT / "requirements/docs.txt")
    assert {"mkdocs-material", "mkdocstrings-python"} <= site.keys()
    assert not site.keys() & pinned(ROOT / "requirements/py311.txt").keys()
    for lock in ("test-py311.txt", "test-py312.txt", "test-py313.txt", "torch-py311.txt"):
        others = pinned(ROOT / "requirements" / lock)
        assert {name: others[name] for name in site.keys() & others.keys()}.items() <= site.items()


def test_what_github_runs_are_targets_of_make_on_pythons_with_a_lock():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    gate = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
    rows = gate["jobs"]["make"]["strategy"]["matrix"]["include"]
    wide = yaml.safe_load((ROOT / ".github/workflows/wide.yml").read_text())
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    commands = [step["run"] for step in wide["jobs"]["make"]["steps"] if "run" in step]
    called = {target for row in rows for target in row["targets"].split()}
    named = called | {word.removeprefix("make ") for word in [*commands, *(hook["entry"] for hook in hooks)]}
    assert named <= targets
    # What .ci/run calls, so that both gates are one.
    own = re.findall(r"^ *\(?(?:for .* do )?run (?:\$\w+|0) ([a-z -]+)", (ROOT / ".ci/run").read_text(), re.M)
    assert called == {target for targets in own for target in targets.split()}
    locks = {f"3.{lock.stem.removeprefix('py3')}" for lock in (ROOT / "requirements").glob("py3*.txt")}
    assert {row["python"] for row in rows} == locks


def test_one_version_is_named():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == version


def test_the_changelog_says_a_version_on_one_screen():
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert all(len(section.splitlines()) <= 50 for section in sections)


def test_no_file_installs_meshwright_from_an_index():
    """It is on none, and a stranger may call something so. `extras.py` has the words that work."""
    wrong = re.compile(r"pip3? install[^\n`]*['\" ]meshwright\b|\bmeshwright\[")
    found = [
        f"{name_of(path)}: {match[0]}"
        for path in files_of_the_project()
        if path.suffix in (".md", ".py", ".toml") and path not in (Path(__file__), ROOT / "docs/dev/LOG.md")
        for match in wrong.finditer(path.read_text())
    ]
    assert not found


# Fresh interpreters, since this one has imported jax long ago.
HELP = """
import sys
sys.argv = ["meshwright", "--help"]
from meshwright.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = {"jax", "jaxlib", "optax", "matplotlib", "tensorboardX", "torch"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else 0)
"""
RECKONING = (
    "units",
    "formats",
    "errors",
    "hardware",
    "config",
    "hlo",
    "ledger",
    "predict",
    "cli",
)


def run_python(code: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The finished interpreter and the CPU seconds, user and system, that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_little_more_than_the_library_that_prints_it_and_imports_nothing_heavy():
    """Compare CPU seconds of the same minute, for a slow machine slows both: 1.3 to 1.9 times was seen."""
    helps: list[float] = []
    libraries: list[float] = []
    for _ in range(3):  # the least of three: caches are cold at first, and neighbours slow a core down
        done, seconds = run_python(HELP)
        assert done.returncode == 0, done.stderr
        assert "weigh" in done.stdout
        helps.append(seconds)
        done, seconds = run_python("import typer.rich_utils")
        assert done.returncode == 0, done.stderr
        libraries.append(seconds)
    assert min(helps) < 3 * min(libraries), (helps, libraries)


def test_reckoning_imports_no_jax():
    imports = "; ".join(f"import meshwright.{name}" for name in RECKONING)
    done, _ = run_python(f"import sys; {imports}; sys.exit('jax' in sys.modules)")
    assert done.returncode == 0, done.stderr
