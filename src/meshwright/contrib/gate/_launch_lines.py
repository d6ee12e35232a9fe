"""Hold what a launcher asks for: devices, a time limit, and the commands that it would run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import InputError
from meshwright.hardware import Fleet, find_chip

from ._shell import Command
from ._tables import Seen

_BY_LABEL = {  # names of clouds that are not the card's own, or mean one of several
    "nvidia-tesla-a100": "A100-40GB",
    "nvidia-h100-mega-80gb": "H100",
    "nvidia-h200-141gb": "H200",
    "nvidia-tesla-v100": "V100-16GB",
    "nvidia-rtx-pro-6000": "RTX-PRO-6000",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a job asks for.

    `chip`: the catalog's name; "" if the job does not say it. `fleet`: the whole fleet as `Fleet.parse` reads
    it, where hosts and chips do not say it (slices of TPUs). `seconds`: its own time limit. `commands`: what
    it runs on each host. `variables`: those that its scheduler sets. `folder`: the folder in which they run,
    if it is not the job's. `mounts`: files and folders here, by their paths there. `is_of_pods`: whether
    Kubernetes runs it.
    """

    kind: str
    file: str
    seen: Seen
    num_hosts: int = 1
    per_host: int | None = None
    chip: str = ""
    fleet: str = ""
    seconds: float | None = None
    commands: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: str = ""
    mounts: Mapping[str, str] = field(default_factory=dict[str, str])
    is_of_pods: bool = False

    def limit_of(self, seconds: float) -> str:
        """Return a time limit of at least these seconds in the launcher's own words."""
        if self.is_of_pods:
            return f"activeDeadlineSeconds: {math.ceil(seconds)}"
        return f"--time={slurm_time(seconds)}"

    def fleet_on(self, on: str | None) -> str:
        """Return the fleet that it asks for.

        Args:
            on: a fleet, which counts more than the job's; or the name of a chip alone, with the job's counts.

        Raises:
            InputError: the job does not say how many chips, or which, and `on` does not either.
        """
        chip = self.chip if on is None else chip_of(on)
        if on is not None and not chip:
            return on
        if on is None and self.fleet:
            return self.fleet
        if self.per_host is None:
            what = f"{self.file}, {self.kind}, does not say how many devices a host has"
            raise InputError(what, hint="name the fleet: --on 2x8xH100")
        count = f"{self.num_hosts}x{self.per_host}" if self.num_hosts > 1 else str(self.per_host)
        if not chip:
            what = f"{self.file}, {self.kind}, asks for {count} devices and does not say of which kind"
            raise InputError(what, hint="name the chip: --on H100")
        name = f"{count}x{chip}"
        Fleet.parse(name)
        return name


def chip_of(text: str) -> str:
    """Return the catalog's name of a chip that a label or an option names; "" if it names none.

    >>> chip_of("nvidia-h100-80gb"), chip_of("NVIDIA-A100-SXM4-80GB"), chip_of("ib")
    ('H100', 'A100-80GB', '')
    """
    name = text.strip().lower().replace("_", "-")
    if name in _BY_LABEL:
        return _BY_LABEL[name]
    try:
        return find_chip(name).name
    except InputError:
        return ""


def slurm_seconds(text: str) -> float | None:
    """Return the seconds of Slurm's time: minutes, minutes:seconds, hours:minutes:seconds, days-hours...

    None for "UNLIMITED" and "0", which is no limit, and for what is no time.

    >>> slurm_seconds("2-12"), slurm_seconds("90"), slurm_seconds("01:30:00")
    (216000.0, 5400.0, 5400.0)
    """
    days, sign, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(re.fullmatch(r"\d{1,6}", part, re.ASCII) for part in (*parts, *([days] if sign else []))):
        return None
    numbers = [int(part) for part in parts]
    if sign:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return float(total) or None


def slurm_time(seconds: float) -> str:
    """Return a time limit of at least these seconds in Slurm's words.

    >>> slurm_time(216_001)
    '2-12:01:00'
    """
    minutes = -(-int(seconds) // 60) if seconds == int(seconds) else int(seconds) // 60 + 1
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
