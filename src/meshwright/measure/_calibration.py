"""This machine's calibration: measured once by a process of its own, then kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..compiler import cache_root, installed_versions
from ..errors import InputError, MeshwrightError
from ..predict import Calibration
from ._host import describe_host

PROBE = "meshwright.measure._probe"
TIME_LIMIT_SECONDS = 120
LAST_LINES = 8


def calibration_of_this_machine() -> Calibration:
    """What this host was measured to do; measured now (a few seconds) where that is not yet known.

    Kept under `cache_root()` by processor, cores, version of jaxlib and the probe's own source; a file
    that cannot be read is measured again.

    Raises:
        MeshwrightError: the probe failed; its last words are in the message.
    """
    path = _path()
    try:
        return Calibration.from_json(path.read_text())
    except (FileNotFoundError, InputError, UnicodeDecodeError):
        return _measure(path)


def probe() -> Calibration:
    """Measure the attached device now, in detail, and keep it for predictions: the CPU, or an accelerator.

    Of a CPU it takes the place of what `calibration_of_this_machine` kept; of an accelerator it is kept by
    the chip's name in the catalog.

    Raises:
        MeshwrightError: the probe failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "calibration.json"
        words = _run_probe(made, detailed=True)
        if not made.exists():
            raise _failed(words)
        calibration = Calibration.from_json(made.read_text())
    path = _path() if calibration.chip == "CPU" else _path_of(calibration.chip)
    _keep(calibration, path)
    return calibration


def calibration_of_chip(name: str) -> Calibration | None:
    """What `probe` measured of such a chip; None where it never did, or the file cannot be read."""
    try:
        return Calibration.from_json(_path_of(name).read_text())
    except (FileNotFoundError, InputError, UnicodeDecodeError):
        return None


def _path_of(chip: str) -> Path:
    return cache_root() / f"calibration-{chip}.json"


def _keep(calibration: Calibration, path: Path) -> None:
    """Whole or not at all, whoever else measures now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".calibration-", delete=False) as file:
        file.write(calibration.to_json())
    Path(file.name).replace(path)


def _failed(words: list[str]) -> MeshwrightError:
    return MeshwrightError(
        "measuring this machine failed. The probe's last words:\n    " + "\n    ".join(words),
        hint=f"run it alone: {Path(sys.executable).name} -m {PROBE} calibration.json",
    )


def _path() -> Path:
    source = Path(__file__).with_name("_probe.py").read_bytes()
    parts = (describe_host().encode(), installed_versions()["jaxlib"].encode(), source)
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return cache_root() / f"calibration-{digest[:16]}.json"


def _measure(path: Path) -> Calibration:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".calibration-") as folder:
        made = Path(folder) / "calibration.json"
        words = _run_probe(made)
        if not made.exists():
            raise _failed(words)
        calibration = Calibration.from_json(made.read_text())
        made.replace(path)  # whole or not at all, whoever else measures now
    return calibration


def _run_probe(made: Path, *, detailed: bool = False) -> list[str]:
    """Run the probe to its end; the last lines it wrote. In detail it measures whatever device there is."""
    command = [sys.executable, "-m", PROBE, str(made), *(["--detailed"] if detailed else [])]
    environment = dict(os.environ) if detailed else {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [f"not done after {TIME_LIMIT_SECONDS} s"]
    return (done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:]
