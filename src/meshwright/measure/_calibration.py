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
            raise MeshwrightError(
                "measuring this machine failed. The probe's last words:\n    " + "\n    ".join(words),
                hint=f"run it alone: {Path(sys.executable).name} -m {PROBE} calibration.json",
            )
        calibration = Calibration.from_json(made.read_text())
        made.replace(path)  # whole or not at all, whoever else measures now
    return calibration


def _run_probe(made: Path) -> list[str]:
    """Run the probe to its end; the last lines it wrote."""
    command = [sys.executable, "-m", PROBE, str(made)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [f"not done after {TIME_LIMIT_SECONDS} s"]
    return (done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:]
