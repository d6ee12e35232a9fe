"""What a newcomer downloads, what it takes on disk, and the CPU time from `pip install` to the first answer.

Run: python benchmarks/install.py PYTHON ...    (an interpreter of each Python)
     python benchmarks/install.py --equal FOLDER OTHER_FOLDER RELEASE ...
For each interpreter, two environments in a temporary folder:
* what `make demo` installs: the wheels of its lock are downloaded and their bytes added up; installed from
  there with this tree in place, the environment's bytes on disk are counted.
* a wheel of this tree with the extra `nvidia`, nothing else: pip with the lock as constraint and an empty
  cache, then `meshwright weigh llama3-8b --on 8xH100 --json` with an empty cache. CPU seconds are those of
  both with their processes.
With `--equal`, weighings of `install_cases.py` in two folders are compared, but for the time of compilation:
made without and with libraries of NVIDIA, by a release of jax. A kernel of Pallas names its source file in
its program, so its environments must lie at one path. Writes records/DATE_install.toml, or with `--equal`
records/DATE_install_equal.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import ROOT, write_record

QUIET = ("--disable-pip-version-check", "--no-input", "--quiet", "--no-cache-dir")
WEIGH = ("weigh", "llama3-8b", "--on", "8xH100", "--json")


def run(*command: str | Path, **more: str) -> str:
    """Run a command outside the tree, so that nothing is imported from there; return its output."""
    environment = {**os.environ, **more}
    environment.pop("PYTHONPATH", None)
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def cpu_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def disk_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take on disk, each once."""
    taken = {}
    for root, _, names in os.walk(folder):
        for name in names:
            about = os.lstat(os.path.join(root, name))
            taken[about.st_ino] = about.st_blocks * 512
    return sum(taken.values())


def environment_of(python: str, folder: Path) -> Path:
    """Make an environment, and return its interpreter."""
    run(python, "-m", "venv", folder)
    return folder / "bin/python"


def of_the_demo(python: str, tag: str, work: Path) -> dict[str, Any]:
    """Measure what `make demo` installs."""
    wheels, lock = work / "wheels", ROOT / f"requirements/py{tag}.txt"
    inside = environment_of(python, work / "demo")
    pip = (inside, "-m", "pip")
    run(*pip, "download", *QUIET, "--no-deps", "--requirement", lock, "--dest", wheels)
    run(*pip, "install", *QUIET, "--no-deps", *sorted(wheels.iterdir()))
    run(*pip, "install", *QUIET, "--no-deps", "--no-build-isolation", "--editable", ROOT)
    run(*pip, "check")
    return {
        "downloaded_bytes": sum(wheel.stat().st_size for wheel in wheels.iterdir()),
        "disk_bytes": disk_bytes(work / "demo"),
    }


def of_the_wheel(python: str, tag: str, wheel: Path, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure a wheel with the extra `nvidia` in an empty environment; return that, and its answer."""
    inside = environment_of(python, work / "wheel")
    lock = ROOT / f"requirements/py{tag}.txt"
    before, started = cpu_seconds(), time.monotonic()
    run(inside, "-m", "pip", "install", *QUIET, "--constraint", lock, f"{wheel}[nvidia]")
    installed = cpu_seconds()
    answer = json.loads(run(work / "wheel/bin/meshwright", *WEIGH, MESHWRIGHT_CACHE_DIR=str(work / "cache")))
    seconds = time.monotonic() - started
    listed = json.loads(run(inside, "-m", "pip", "list", "--format", "json"))
    names = [each["name"] for each in listed]
    row = {
        "disk_bytes": disk_bytes(work / "wheel"),
        "packages": len(names),
        "of_nvidia": [name for name in names if name.startswith("nvidia-")],
        "install_cpu_seconds": round(installed - before, 1),
        "weigh_cpu_seconds": round(cpu_seconds() - installed, 1),
        "wall_seconds": round(seconds, 1),
    }
    return row, answer


def without_seconds(answer: dict[str, Any]) -> dict[str, Any]:
    """A weighing without the time that its compilation took, and whether it was kept from before."""
    kept = {name: value for name, value in answer["compile"].items() if name not in ("seconds", "cached")}
    return {**answer, "compile": kept}


def compared(folder: Path, other: Path) -> tuple[list[str], list[str]]:
    """Compare the weighings that two folders hold in files of one name; return those equal, and those not."""
    same, different = [], []
    for path in sorted(folder.glob("*.json")):
        if (other / path.name).exists():
            one, two = (json.loads((each / path.name).read_text()) for each in (folder, other))
            is_same = one == two if "compile" not in one else without_seconds(one) == without_seconds(two)
            (same if is_same else different).append(path.stem)
    return same, different


def main() -> None:
    """Measure each interpreter, print and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--equal", nargs=3, action="append", default=[], metavar=("LIGHT", "FULL", "JAX"))
    parser.add_argument("--answers", type=Path, help="a folder for the wheels' answers, as 311.json")
    given = parser.parse_args()
    command = "python benchmarks/install.py"
    if given.pythons:
        rows = measured(given.pythons, given.answers)
        facts = {"weighed": " ".join(WEIGH)}
        print("wrote", write_record("install", f"{command} PYTHON ...", (), facts, {"install": rows}))
    if given.equal:
        table = []
        for light, full, jax in given.equal:
            same, different = compared(Path(light), Path(full))
            table.append({"jax": jax, "equal": same, "different": different})
            print(table[-1])
        print("wrote", write_record("install_equal", f"{command} --equal ...", (), {}, {"equal": table}))


def measured(pythons: list[str], answers: Path | None) -> list[dict[str, Any]]:
    """Measure each interpreter, and print a row of each."""
    rows = []
    with tempfile.TemporaryDirectory() as made:
        run(pythons[0], "-m", "pip", "wheel", *QUIET, "--no-deps", "--wheel-dir", made, ROOT)
        wheel = next(Path(made).glob("*.whl"))
        for python in pythons:
            version = run(python, "-c", "import platform; print(platform.python_version())").strip()
            tag = "".join(version.split(".")[:2])
            work = Path(made, tag)
            work.mkdir()
            demo = of_the_demo(python, tag, work)
            row, answer = of_the_wheel(python, tag, wheel, work)
            rows.append({"python": version, "demo": demo, "wheel": row})
            print(rows[-1], flush=True)
            if answers is not None:
                (answers / f"{tag}.json").write_text(json.dumps(answer))
    return rows


if __name__ == "__main__":
    main()
