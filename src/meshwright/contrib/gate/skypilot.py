"""Gate SkyPilot's tasks: an admin policy, for `admin_policy: meshwright.contrib.gate.skypilot.GatePolicy`.

Limits are the words of `meshwright gate` in the variable MESHWRIGHT_GATE of SkyPilot's server, as in
"--max-cost 5000 --max-days 7". A task that cannot be read goes, unless that has --strict: most tasks train
nothing. `sky` is imported when SkyPilot asks for the policy, and nowhere else.
"""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MeshwrightError

from ._gate import Limits, gate_of
from ._jobs import job_of
from ._skypilot import skypilot
from ._trainers import Reading

LOG = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Return the policy: a class of SkyPilot's `AdminPolicy`, which must be installed."""
    if name != "GatePolicy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import sky  # pyright: ignore[reportMissingImports]

    def validate_and_mutate(cls: type, user_request: Any) -> Any:
        if refused := refusal_of(user_request.task.to_yaml_config()):
            raise RuntimeError(f"meshwright gate: {refused}")
        return sky.MutatedUserRequest(user_request.task, user_request.skypilot_config)

    members = {"validate_and_mutate": classmethod(validate_and_mutate), "__doc__": refusal_of.__doc__}
    return type("GatePolicy", (sky.AdminPolicy,), members)


def refusal_of(task: dict[str, Any]) -> str:
    """Return why a task is refused, and what would do; "" if it may go."""
    name = str(task.get("name") or "the task")
    is_strict = True
    try:
        limits, is_strict = limits_of(os.environ.get("MESHWRIGHT_GATE", ""))
        launch = skypilot(name, [{"resources": {}, "run": "", **task}])
        made = gate_of(job_of(name, launch, None, Path.cwd(), Reading()), limits=limits)
    except MeshwrightError as wrong:
        if is_strict:
            return str(wrong)
        LOG.info("meshwright gate could not read %s: %s", name, wrong)
        return ""
    cures = [f"with {cure.change} it may go ({cure.words})" for cure in made.cures]
    return "" if made.may_go else f"{made.line}: {'; '.join([*made.reasons, *cures])}"


def limits_of(text: str) -> tuple[Limits, bool]:
    """Return the limits that words name, and whether they have --strict.

    Raises:
        InputError: a word is no limit.
    """
    found: dict[str, float] = {}
    is_strict = False
    try:
        words = shlex.split(text)
    except ValueError as wrong:
        raise InputError(f"MESHWRIGHT_GATE cannot be read: {wrong}", hint="close its quotes") from None
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
