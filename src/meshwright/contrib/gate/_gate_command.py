"""Define `meshwright gate`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli import JsonFlag, answer_with, phases
from meshwright.errors import InputError

JobArgument = Annotated[
    Path,
    typer.Argument(
        metavar="JOB",
        help="An sbatch script, a Kubernetes Job, JobSet or PyTorchJob, a SkyPilot task; or a recipe: "
        "torchtitan, axolotl, LLaMA-Factory, TrainingArguments, Megatron-LM's arguments.",
        show_default=False,
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on", metavar="FLEET", help="8xH100; or H100, with the job's counts.", show_default="the job's"
    ),
]
CostOption = Annotated[float | None, typer.Option("--max-cost", help="Refuse what costs more.")]
DaysOption = Annotated[float | None, typer.Option("--max-days", help="Refuse what takes longer.")]
WarnOption = Annotated[bool, typer.Option("--warn", help="Say why it is refused, and exit with status 0.")]
ProgramOption = Annotated[
    str | None,
    typer.Option(
        "--program", metavar="WORDS", help='What it trains, as weigh takes it: "llama3-8b --layout fsdp=8".'
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="ID", help="The model, in place of the recipe's.")
]
IgnoreOption = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="KEY", help="Weigh without this key. Repeatable.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one of our keys. Repeatable."),
]
TokensOption = Annotated[
    str | None, typer.Option("--tokens", metavar="COUNT", help="Tokens of the whole run, 15M.")
]
PriceOption = Annotated[
    str | None,
    typer.Option("--price", metavar="PRICE", help="Price of a device-hour.", show_default="the list price"),
]
SbatchOption = Annotated[
    str | None,
    typer.Option("--sbatch-options", metavar="JSON", help="What sbatch was given beside the script."),
]


def gate(
    job: JobArgument,
    on: OnOption = None,
    max_cost: CostOption = None,
    max_days: DaysOption = None,
    warn: WarnOption = False,
    program: ProgramOption = None,
    model: ModelOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    options: SbatchOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Weigh a job before a launch: status 0 it may go, 3 it is refused, 2 it could not be read."""
    from meshwright.programs import RunLength

    from ._gate import REFUSED, Limits
    from ._gate import gate as run_gate
    from ._trainers import Reading

    reading = Reading(
        model=model or "",
        ignore=tuple(ignore or ()),
        program=() if program is None else _split(program),
        options={} if options is None else _parsed(options),
    )
    with phases(f"weighing {job}") as on_event:
        made = run_gate(
            job,
            on=on,
            overrides=overrides or (),
            run=RunLength(tokens=tokens, price_per_device_hour=price),
            limits=Limits(max_cost=max_cost, max_days=max_days),
            reading=reading,
            on_event=on_event,
        )
    answer_with(made, as_json)
    if not (made.may_go or warn):
        raise typer.Exit(REFUSED)


def _split(words: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(words))
    except ValueError as wrong:
        raise InputError(f"cannot read {words[:80]!r}: {wrong}", hint="close its quotes") from wrong


def _parsed(text: str) -> dict[str, Any]:
    from meshwright.files import parsed_json

    try:
        found = parsed_json(text)
    except ValueError as wrong:
        raise InputError(f"--sbatch-options is no JSON: {wrong}", hint='write {"nodes": "2"}') from wrong
    if not isinstance(found, dict):
        raise InputError("--sbatch-options is no table", hint='write {"nodes": "2"}')
    return found
