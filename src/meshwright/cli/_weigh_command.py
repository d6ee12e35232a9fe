"""Define `meshwright weigh`, and the options that it shares with `plan`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import InputError
from meshwright.reportable import check_place

from ._console import JsonFlag, answer, complete_config, phases, say_readings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.reportable import Reportable
    from meshwright.results import Operated, Phase, Weighing

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
OperationsOption = Any  # what `with_operations` passes: mw.Operations, which `--help` does not import
FINISH_PANEL = "When it will be done"


def _option(name: str, metavar: str, words: str) -> Any:
    return typer.Option(name, metavar=metavar, help=words, rich_help_panel=FINISH_PANEL, show_default=False)


FINISH_OPTIONS: dict[str, Any] = {
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
    """Return a command that also takes `FINISH_OPTIONS`, and passes them on as its parameter `operations`."""

    @wraps(command)
    def with_options(**given: Any) -> None:
        answers = {name: given.pop(name) for name in FINISH_OPTIONS}
        command(**given, operations=_operations(answers))

    own = inspect.signature(command, eval_str=True)
    parameters = [each for name, each in own.parameters.items() if name != "operations"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in FINISH_OPTIONS.items()
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
    check_place(html, trace)
    on = with_reserve(on, reserve)
    options = {"rules": rules, "as_": as_, "all_calls": all_calls, "auto_meshes": auto_meshes}
    run = {"tokens": tokens, "tokens_per_step": tokens_per_step, "price_per_device_hour": price}
    if longest or largest_batch:
        flags = {"check": check, "simulate": simulate, "explain": explains, "longest": longest}
        others = options | run | flags | {"html": html, "trace": trace}
        others |= {name: getattr(operations, name, None) for name in FINISH_OPTIONS}
        of, changed = _searched(largest_batch, others), with_lora(overrides, lora)
        return _changes_room().answer_largest(config, of, on, layout, changed, as_json, verbose)
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
    fields = _fields(made, changes, all_calls) if as_json else None
    answer(as_json, fields, lambda: _page(made, changes, verbose))
    if check and any(each.fits is False for each in made):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


_OPTION_NAMES = {"as_": "as", "all_calls": "all", "price_per_device_hour": "price"}


def _searched(is_of_batch: bool, others: dict[str, Any]) -> str:
    """Return the quantity that is searched.

    Raises:
        InputError: an option is given that a search does not read.
    """
    search = "largest-batch" if is_of_batch else "longest"
    for name, value in others.items():
        option = f"--{_OPTION_NAMES.get(name, name).replace('_', '-')}"
        if value is not None and value is not False and name != search:
            what = f"--{search} searches what fits, and {option} is not read beside it"
            raise InputError(what, hint=f"leave {option} out; then weigh what it finds with {option}")
    return "batch" if is_of_batch else "sequence_length"


def _changes(weighing: Weighing, on_event: Callable[[Phase], None]) -> Reportable:
    return _changes_room().explain(weighing, on_event=on_event)


def _changes_room() -> Any:
    from meshwright.registry import room

    return room("changes")


def _page(made: Sequence[Weighing], changes: Reportable | None, verbose: bool) -> tuple[RenderableType, ...]:
    from meshwright.report import renderable

    texts = tuple(renderable(each, verbose=verbose) for each in made)
    return texts if changes is None else (*texts, renderable(changes))


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
