"""Define `meshwright weigh` and `meshwright account`."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.errors import InputError, MeshwrightError

from ._console import JsonFlag, answer, complete_config, phases, say_readings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.results import Phase, TorchWeighing, Weighing
    from meshwright.torch_account import Account

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
        metavar="jax",
        help="Weigh a function's PyTorch module as a JAX program: model.py:build --as jax --on 8xH100.",
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
) -> None:
    """Weigh one training step: its memory, FLOPs, traffic and time on a fleet that need not exist."""
    if longest or largest_batch:
        of = "sequence_length" if longest else "batch"
        return _answer_largest(config, of, on, layout, with_lora(overrides, lora), as_json, verbose)
    from meshwright import explain
    from meshwright.results import TorchWeighing

    counts = {"tokens": tokens, "tokens_per_step": tokens_per_step, "price_per_device_hour": price}
    how: dict[str, Any] = {"simulate": simulate, "as_": as_, **counts}
    of_scripts = {"all_calls": all_calls, "auto_meshes": auto_meshes}
    with phases(f"weighing {' '.join(config)} on {on}") as on_phase:

        def on_event(event: Phase) -> None:
            on_phase(event.name)

        made = _weighed(
            config, on, layout, with_lora(overrides, lora), of_scripts, rules, **how, on_event=on_event
        )
        weighing = made[0]
        if isinstance(weighing, TorchWeighing):
            _check_eager(weighing, {"--explain": explains, "--trace": trace is not None})
        changes = explain(weighing, on_event=on_event) if explains else None
    _write(weighing, html, trace)

    def page() -> tuple[RenderableType, ...]:
        from meshwright.report import renderable

        texts = tuple(renderable(each, verbose=verbose) for each in made)
        return texts if changes is None else (*texts, renderable(changes))

    fields = weighing.to_dict() | ({} if changes is None else changes.to_dict())
    answer(as_json, {"weighings": [each.to_dict() for each in made]} if all_calls else fields, page)
    if check and any(each.fits is False for each in made):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _answer_largest(
    words: list[str],
    of: Literal["sequence_length", "batch"],
    on: str,
    layout: str | None,
    overrides: list[str],
    as_json: bool,
    verbose: bool,
) -> None:
    """Search the largest sequence length or batch that fits, and print it with its weighing.

    Raises:
        InputError: a script or a function is named, whose sequences and batch are its own.
    """
    from meshwright import largest

    if len(words) > 1 or words[0].endswith(".py") or ":" in words[0]:
        hint = "name a preset, a TOML file or the folder of a model"
        raise InputError(f"{' '.join(words)} has a length and a batch of its own", hint=hint)
    say_readings(words[0], on, layout)
    with phases(f"searching with {words[0]} on {on}") as on_phase:

        def on_event(event: Phase) -> None:
            on_phase(event.name)

        made = largest(words[0], of, on=on, layout=layout, overrides=overrides, on_event=on_event)

    def page() -> tuple[RenderableType, ...]:
        from rich.text import Text

        from meshwright.report import renderable

        return Text(made.line, style="bold"), renderable(made.weighing, verbose=verbose)

    answer(as_json, made.to_dict(), page)


def _write(weighing: Weighing, html: Path | None, trace: Path | None) -> None:
    """Write the files that are asked for."""
    if html is not None:
        weighing.to_html(html)
    if trace is not None:
        weighing.to_perfetto(trace)


def _check_eager(weighing: TorchWeighing, given: dict[str, bool]) -> None:
    """Raise if an option is given that needs a compiled program or its time."""
    for option, is_given in given.items():
        if is_given:
            what = f"{weighing.name} returns a PyTorch module, and {option} needs a compiled step"
            raise InputError(what, hint=f"leave {option} out; --html FILE shows the memory through the step")


def _weighed(
    words: list[str],
    on: str,
    layout: str | None,
    overrides: Sequence[str],
    of_scripts: dict[str, bool],
    rules: Path | None,
    **how: Any,
) -> tuple[Weighing, ...]:
    """Weigh a configuration or a program by its name, or a script; say what a script read on the host.

    Raises:
        InputError: an option is given that has no meaning for a script, or only for one.
    """
    if words[0].endswith(".py") or len(words) > 1:
        from meshwright import weigh_script

        for option, value in (
            ("--layout", layout),
            ("--set", overrides),
            ("--rules", rules),
            ("--as", how.pop("as_")),
        ):
            if value:
                raise InputError(
                    f"a script takes no {option}", hint="change it in the script or its arguments"
                )
        say_readings(None, on, None)
        made = weigh_script(words, on=on, **of_scripts, **how)
        for line in dict.fromkeys(made[0].ledger.assumptions):
            print(f"note: {line}", file=sys.stderr)
        return made
    for option, value in of_scripts.items():
        if value:
            option = "--all" if option == "all_calls" else "--auto-meshes"
            hint = f"meshwright weigh {option} --on 8xH100 -- python train.py"
            raise InputError(f"{option} is for a script", hint=hint)
    if how["as_"] is not None and on != "local":  # the module is traced here, and an attached GPU is not used
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from meshwright import weigh as run_weigh

    say_readings(words[0], on, layout)
    return (run_weigh(words[0], on=on, layout=layout, overrides=overrides, rules=rules, **how),)


def account(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help="package.module:function; it takes nothing and returns (module, *inputs) or a dict with "
            "'module', 'inputs', 'optimizer', 'loss', 'autocast'.",
            show_default=False,
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Count memory and FLOPs of a PyTorch module's eager training step on one device, without running it."""
    from multiprocessing import resource_tracker

    from meshwright.children import ending_descendants

    resource_tracker.ensure_running()  # multiprocessing shares it: started here, it is not ended below
    with ending_descendants(), phases(f"accounting {function}"):
        made = _account_apart(function)

    def page() -> RenderableType:
        from meshwright.report import renderable

        return renderable(made)

    answer(as_json, made.to_dict(), page)


TIME_LIMIT_SECONDS = 1200.0  # as a script has


def _account_apart(function: str) -> Account:
    """Account for the result of `function` in a separate process, which the function may end or crash.

    Raises:
        InputError: as for `account_function`; or the process ended without an answer.
    """
    from meshwright.children import safe_path

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", prefix="meshwright-account-") as crash:
        child = context.Process(target=_answer, args=(theirs, function, os.getcwd(), crash.name))
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process
        try:
            with safe_path():
                child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        try:
            if not ours.poll(TIME_LIMIT_SECONDS):
                raise InputError(
                    f"{function} was not done after {TIME_LIMIT_SECONDS:.0f} s",
                    hint="run it by itself to see what it waits for, or let it make a smaller module",
                )
            made: Account | Exception = ours.recv()
        except EOFError:
            child.join()
            raise _ended(function, child.exitcode or 0, crash.read()) from None
        finally:
            child.kill()  # it has answered or is given up, whatever threads and signals it has set up
            child.join()
    if isinstance(made, Exception):
        raise made
    return made


def _ended(function: str, status: int, crash: str) -> InputError:
    """Return the error for a process that `function` ended; `crash` is the output of faulthandler, or ""."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    line = next((line.strip() for line in crash.splitlines() if line.startswith("  File ")), "")
    return InputError(
        f"{function}, or what it calls, ended its process, which {how}" + (f" at {line}" if line else ""),
        hint="take os._exit out of it, or run it by itself to see where it crashes",
    )


def _answer(answers: Connection, function: str, folder: str, crash: str) -> None:
    """Send the account of `function`, or its error; the output of `function` goes to stderr."""
    os.dup2(2, 1)
    with open(crash, "w") as file:
        faulthandler.enable(file)
        from meshwright.torch_account import account_function

        try:
            answers.send(account_function(function, search_path=(folder,)))
        except MeshwrightError as error:
            answers.send(error)
        except Exception:
            what = f"in the process that accounts for {function}:\n{traceback.format_exc()}"
            answers.send(RuntimeError(what))
        except BaseException as ended:  # Ctrl-C is blocked here: the function raised this itself
            what = f"{function}, or what it calls, raised {type(ended).__name__}"
            answers.send(InputError(what, hint="raise an Exception for what goes wrong"))
