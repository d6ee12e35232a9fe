"""Define `meshwright weigh`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import InputError

from ._console import JsonFlag, answer, complete_config, phases, say_readings
from ._finish_options import OperationsOption, with_operations

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.reportable import Reportable
    from meshwright.results import Phase, Weighing

EXIT_DOES_NOT_FIT = 3

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A preset, a TOML file, the folder of a run, or package.module:function.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG",
        help="A preset, a TOML file, the folder of a run, package.module:function, or the command of your "
        "own training script: -- python train.py ARGS.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option("--layout", help="Mesh axes, outermost first: fsdp=64,tensor=8; one size may be -1."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key: model.num_layers=12. Repeatable."),
]
AsOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="torch|jax",
        help="Weigh a Hugging Face model as the PyTorch module of transformers (torch), or a module as a JAX "
        "program (jax): model.py:build --as jax.",
        show_default=False,
    ),
]
LoraOption = Annotated[
    int | None,
    typer.Option(
        "--lora",
        metavar="RANK",
        min=1,
        help="Freeze the model and train adapters of this rank: --set lora.rank=RANK.",
        show_default=False,
    ),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Print every table, not one screen.")]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="COUNT",
        help="Tokens of the whole run, 15B: adds its hours and device-hours.",
        show_default="the config's steps",
    ),
]
TokensPerStepOption = Annotated[
    str | None,
    typer.Option(
        "--tokens-per-step",
        metavar="COUNT",
        help="Tokens or samples in a step of your own program: adds its throughput.",
    ),
]
PriceOption = Annotated[
    str | None,
    typer.Option("--price", metavar="PRICE", help="Price of a device-hour, 1.80: adds the cost of the run."),
]
ReserveOption = Annotated[
    str | None,
    typer.Option(
        "--reserve",
        metavar="SIZE",
        help="Leave so much memory of each device to another process: 20GiB.",
        show_default=False,
    ),
]
RulesOption = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE", help="Python file that calls meshwright.register_kernel."),
]
SimulateOption = Annotated[
    bool, typer.Option("--simulate", help="Use the CPU's compiler, and mark the figures.")
]
AllOption = Annotated[
    bool, typer.Option("--all", help="Weigh each jitted call of a script, not only its training step.")
]
AutoMeshesOption = Annotated[
    bool, typer.Option("--auto-meshes", help="Run a script of before JAX 0.9, whose meshes were Auto.")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the account as a page with pictures.")
]
LongestOption = Annotated[
    bool, typer.Option("--longest", help="Search the longest sequence that fits, and weigh that.")
]
LargestBatchOption = Annotated[
    bool, typer.Option("--largest-batch", help="Search the largest microbatch that fits, and weigh that.")
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write the predicted step for ui.perfetto.dev.")
]


def with_lora(overrides: list[str] | None, rank: int | None) -> list[str]:
    """Return the overrides of a command, with that of its option `--lora`."""
    return [*(overrides or ()), *([] if rank is None else [f"lora.rank={rank}"])]


def keep_from_gpu(as_: str | None, on: str | None) -> None:
    """Let jax trace on the CPU, and not take an attached GPU, where the command itself traces a module."""
    if as_ is not None and on != "local":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def with_reserve(on: str, reserve: str | None) -> str:
    """Return the text of a fleet with that of the option `--reserve`."""
    return on if reserve is None else f"{on} reserve {reserve}"


@with_operations
def weigh(
    config: Words,
    on: Annotated[
        str, typer.Option("--on", metavar="FLEET", help="64xH100, 16x4xA100-80GB, v5p-512, 8xCPU, or local.")
    ],
    layout: LayoutOption = None,
    overrides: SetOption = None,
    lora: LoraOption = None,
    as_: AsOption = None,
    as_json: JsonFlag = False,
    verbose: VerboseOption = False,
    tokens: TokensOption = None,
    tokens_per_step: TokensPerStepOption = None,
    price: PriceOption = None,
    reserve: ReserveOption = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 3 if it does not fit.")] = False,
    simulate: SimulateOption = False,
    html: HtmlOption = None,
    trace: TraceOption = None,
    rules: RulesOption = None,
    explains: Annotated[
        bool, typer.Option("--explain", help="Compile each change that would help; show saving and cost.")
    ] = False,
    all_calls: AllOption = False,
    auto_meshes: AutoMeshesOption = False,
    longest: LongestOption = False,
    largest_batch: LargestBatchOption = False,
    operations: OperationsOption = None,
) -> None:
    """Weigh one training step: its memory, FLOPs, traffic and time on a fleet that need not exist."""
    on = with_reserve(on, reserve)
    if longest or largest_batch:
        of, changed = "sequence_length" if longest else "batch", with_lora(overrides, lora)
        return _changes_room().answer_largest(config, of, on, layout, changed, as_json, verbose)
    options = {"rules": rules, "as_": as_, "all_calls": all_calls, "auto_meshes": auto_meshes}
    run = {"tokens": tokens, "tokens_per_step": tokens_per_step, "price_per_device_hour": price}
    with phases(f"weighing {' '.join(config)} on {on}") as on_phase:

        def on_event(event: Phase) -> None:
            on_phase(event.name)

        how = {"layout": layout, "overrides": with_lora(overrides, lora), "simulate": simulate}
        run |= {"operations": operations}
        weighing = _weighed(config, options, on, **how, run=run, on_event=on_event)
        if not weighing.is_compiled and weighing.refusal is None:
            _check_eager(weighing, {"--explain": explains, "--trace": trace is not None})
        changes = _changes(weighing, on_event) if explains else None
    _write(weighing, html, trace)
    made = (weighing, *weighing.other_calls)

    def page() -> tuple[RenderableType, ...]:
        from meshwright.report import renderable

        texts = tuple(renderable(each, verbose=verbose) for each in made)
        return texts if changes is None else (*texts, renderable(changes))

    answer(as_json, _fields(made, changes, all_calls) if as_json else None, page)
    if check and any(each.fits is False for each in made):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _changes(weighing: Weighing, on_event: Callable[[Phase], None]) -> Reportable:
    return _changes_room().explain(weighing, on_event=on_event)


def _changes_room() -> Any:
    from meshwright.registry import room

    return room("changes")


def _fields(made: Sequence[Weighing], changes: Reportable | None, all_calls: bool) -> dict[str, Any]:
    if all_calls:
        return {"weighings": [each.to_dict() for each in made]}
    return made[0].to_dict() | ({} if changes is None else changes.to_dict())


def _write(weighing: Weighing, html: Path | None, trace: Path | None) -> None:
    """Write the files that are asked for."""
    if html is not None:
        weighing.to_html(html)
    if trace is not None:
        weighing.to_perfetto(trace)


def _check_eager(weighing: Weighing, given: dict[str, bool]) -> None:
    """Raise if an option is given that needs a compiled program or its time."""
    for option, is_given in given.items():
        if is_given:
            what = f"{weighing.name} returns a PyTorch module, and {option} needs a compiled step"
            raise InputError(what, hint=f"leave {option} out; --html FILE shows the memory through the step")


def _weighed(
    words: list[str], options: dict[str, Any], on: str, *, run: dict[str, Any], **how: Any
) -> Weighing:
    """Weigh what the words name, and say what a script read on the host.

    Args:
        options: of one kind of program alone, by name.
        run: the tokens and the price of the run.

    Raises:
        InputError: an option is given that has no meaning for this kind of program.
    """
    keep_from_gpu(options["as_"], on)
    from meshwright import RunLength
    from meshwright import weigh as run_weigh
    from meshwright.programs import program_named

    program = program_named(words, options)
    say_readings(*(None, on, None) if program.is_command else (words[0], on, how["layout"]))
    made = run_weigh(program, on=on, run=RunLength(**run), **how)
    for line in dict.fromkeys(made.figures.assumptions) if program.is_command and made.figures else ():
        print(f"note: {line}", file=sys.stderr)
    return made
