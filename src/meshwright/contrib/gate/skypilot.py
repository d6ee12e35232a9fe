"""Gate SkyPilot's tasks: an admin policy, for `admin_policy: meshwright.contrib.gate.skypilot.GatePolicy`.

SkyPilot imports this module; nothing else does, and it is the only one that imports `sky`. Limits are the words
of `meshwright gate` in the variable MESHWRIGHT_GATE of SkyPilot's server: "--max-cost 5000 --max-days 7". A task
that cannot be read goes, unless MESHWRIGHT_GATE has --strict: most tasks train nothing.
"""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import sky  # pyright: ignore[reportMissingImports]

from meshwright.errors import InputError, MeshwrightError

from ._gate import Limits, gate_of
from ._jobs import Reading, job_of
from ._skypilot import skypilot

LOG = logging.getLogger(__name__)


class GatePolicy(sky.AdminPolicy):
    """Refuse a task that does not fit, or costs or takes more than it may."""

    @classmethod
    def validate_and_mutate(cls, user_request: Any) -> Any:
        """Return the request as it is.

        Raises:
            RuntimeError: the task is refused; the text says why, and what would do.
        """
        limits, is_strict = limits_of(os.environ.get("MESHWRIGHT_GATE", ""))
        task = user_request.task.to_yaml_config()
        name = str(task.get("name") or "the task")
        try:
            launch = skypilot(name, [{"resources": {}, "run": "", **task}])
            made = gate_of(job_of(name, launch, None, Path.cwd(), Reading()), limits=limits)
        except MeshwrightError as wrong:
            if is_strict:
                raise RuntimeError(f"meshwright gate: {wrong}") from wrong
            LOG.info("meshwright gate could not read %s: %s", name, wrong)
            return sky.MutatedUserRequest(user_request.task, user_request.skypilot_config)
        if not made.may_go:
            cures = [f"with {cure.change} it may go ({cure.words})" for cure in made.cures]
            raise RuntimeError(f"meshwright gate: {made.line}: {'; '.join([*made.reasons, *cures])}")
        return sky.MutatedUserRequest(user_request.task, user_request.skypilot_config)


def limits_of(text: str) -> tuple[Limits, bool]:
    """Return the limits that words name, and whether they have --strict.

    Raises:
        InputError: a word is no limit.
    """
    found: dict[str, float] = {}
    is_strict = False
    words = shlex.split(text)
    while words:
        word = words.pop(0)
        if word == "--strict":
            is_strict = True
            continue
        name, sign, value = word.partition("=")
        value = value if sign else (words.pop(0) if words else "")
        try:
            if name not in ("--max-cost", "--max-days"):
                raise ValueError
            found[name[2:].replace("-", "_")] = float(value)
        except ValueError:
            what = f"MESHWRIGHT_GATE has {word[:40]!r}, which is no limit"
            raise InputError(what, hint="write --max-cost 5000 --max-days 7 --strict") from None
    return Limits(**found), is_strict
