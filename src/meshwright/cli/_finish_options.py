"""Add the options that say how a run is operated, for when it is finished, to a command.

Used by: `weigh` and `plan`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from meshwright.results import Operated

OperationsOption = Any  # what `with_operations` passes: mw.Operations, which `--help` does not import
PANEL = "When it will be done"


def _option(name: str, metavar: str, words: str) -> Any:
    return typer.Option(name, metavar=metavar, help=words, rich_help_panel=PANEL, show_default=False)


# By the field of `Operations`.
OPTIONS: dict[str, Any] = {
    "start": Annotated[str | None, _option("--start", "DATE", "Day on which the run begins: 2026-12-01.")],
    "restart": Annotated[
        str | None,
        _option("--restart", "automatic|manual", "Whether a run that a fault stops begins again by itself."),
    ],
    "restart_seconds": Annotated[
        float | None,
        _option("--restart-seconds", "SECONDS", "From a fault until steps are made again."),
    ],
    "checkpoint_seconds": Annotated[
        float | None,
        _option("--checkpoint-seconds", "SECONDS", "For which the steps wait at a checkpoint; 0: in memory."),
    ],
    "spares": Annotated[int | None, _option("--spares", "COUNT", "Hosts ready to replace broken ones.")],
    "failures": Annotated[
        str | None,
        _option("--failures", "TEXT", 'Faults that you have seen: "12 in 400 node-days".'),
    ],
    "spot_hours": Annotated[
        float | None,
        _option("--spot-hours", "HOURS", "Hours between two interruptions of one spot host."),
    ],
}


def with_operations(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes these options, and passes them on as its parameter `operations`."""

    @wraps(command)
    def with_options(**given: Any) -> None:
        answers = {name: given.pop(name) for name in OPTIONS}
        command(**given, operations=_operations(answers))

    own = inspect.signature(command, eval_str=True)
    parameters = [each for name, each in own.parameters.items() if name != "operations"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in OPTIONS.items()
    ]
    made: Any = with_options
    made.__annotations__ = {each.name: each.annotation for each in parameters}
    made.__signature__ = own.replace(parameters=parameters)
    del made.__wrapped__
    return made


def _operations(answers: dict[str, Any]) -> Operated | None:
    """Return how the run is operated; None if no option says anything."""
    if all(answer is None for answer in answers.values()):
        return None
    from meshwright.registry import room

    return room("finishing").Operations(**answers)
