"""Define the command `meshwright`: its verbs, how it reads their words, and its exit status.

Wrong words are answered as unknown keys of a configuration are: an unknown option is an `InputError`, whose
hint a room outside the core has.

The exit status: 0 done; 1 failed; 2 wrong input; 3 `--check` was given and the step does not fit; 4 broke
off, by an unforeseen error or because the run hung; 130 stopped by Ctrl-C; 143 stopped by SIGTERM. When
`train` is stopped, it first saves a checkpoint. A reader that stops reading the answer (`| head -1`) changes
none of these.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from meshwright.errors import (
    EXIT_BROKE_OFF,
    InputError,
    MeshwrightError,
    near_names,
    nearest_name,
    printable,
)
from meshwright.plugins import quiet_jax_plugins

from ._console import EXIT_INTERRUPTED, standard_streams

HELP_NAMES = ["--help", "-h"]
REPEAT_SECONDS = 0.05  # by then the callback that a Ctrl-C interrupted has returned
REFUSALS = {
    errno.EACCES, errno.EDQUOT, errno.EISDIR, errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG, errno.ENOSPC,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""With these the system refuses a file: its words say why, and a traceback would say no more."""


FIRST, KNOW, GUARD, RUN, LOOK = "Begin with these", "Know more", "Compare and guard", "Run", "Look up"
PANELS = {
    FIRST: {
        "weigh": ("cli._weigh_command", "weigh llama3-8b --on 8xH100 --layout fsdp=8"),
        "plan": ("cli._plan_command", "plan llama3-8b --on 64xH100 --tokens 15T"),
        "train": ("cli._train_command", "train bytes-nano --on 8xCPU --layout data=4,tensor=2 --steps 10"),
    },
    KNOW: {
        "probe": ("contrib.doctor._doctor_commands", "probe --json"),
        "calibrate": (
            "contrib.calibration._calibrate_command",
            "calibrate llama3-8b --on 64xH100 --layout fsdp=64 --measured 9.4s",
        ),
        "reconcile": (
            "contrib.causes._reconcile_command",
            "reconcile llama3-8b --on 64xH100 --layout fsdp=64 --trace profile/",
        ),
    },
    GUARD: {
        "check": ("contrib.check._check_commands", "check --against main"),
        "diff": ("contrib.check._check_commands", "diff llama3-8b 'llama3-8b --set remat=full' --on 8xH100"),
        "runs": ("contrib.runs._runs_commands", ""),  # a group, whose commands have examples of their own
        "compare": ("contrib.runs._runs_commands", "compare runs/a runs/b --html page.html"),
        "gate": ("contrib.gate._gate_command", "gate train.sbatch --max-cost 5000"),
        "explain": ("contrib.explain._explain_command", "explain train.log"),
    },
    RUN: {
        "sweep": (
            "contrib.sweeps._sweep_command",
            "sweep linear --on 1xCPU --set optimizer.learning_rate=0.01,0.1",
        ),
        "watch": ("contrib.watch._watch_command", "watch runs/bytes-10m"),
        "sample": ("contrib.trained._trained_commands", "sample runs/bytes-10m --prompt 'def ' --tokens 80"),
        "export": ("contrib.trained._trained_commands", "export runs/bytes-10m --to bytes-10m.safetensors"),
        "data": ("contrib.texts._data_commands", ""),  # a group, as `runs`
    },
    LOOK: {
        "presets": ("contrib.catalog._catalog_commands", "presets llama3-8b"),
        "init": ("contrib.catalog._catalog_commands", "init mine.toml --from bytes-10m"),
        "fleets": ("contrib.catalog._catalog_commands", "fleets H100"),
        "formats": ("contrib.catalog._catalog_commands", "formats --json"),
        "doctor": ("contrib.doctor._doctor_commands", "doctor --json"),
    },
}
"""By verb, as `--help` groups them: the module of its function, below `meshwright`, and an example."""


def _in_words(parameters: list[Any]) -> list[Any]:
    """Have parameters show what they take as a word: TEXT, NUMBER, PATH, nothing for a flag."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type = lambda ctx: ""  # its name and its help say what it is
        elif isinstance(parameter, TyperOption) and parameter.metavar is None:
            parameter.metavar = _type_of(parameter)
    return parameters


class Command(TyperCommand):
    """A command that refuses unknown and repeated options, and empty arguments and file names, in words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return _in_words(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            InputError: there is no such option, one with one value is given twice, or a name is empty.
        """
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except Exception as wrong:
            if type(wrong).__name__ != "NoSuchOption":  # click's, whose own module is typer's affair
                raise
            name: str = wrong.option_name  # pyright: ignore[reportAttributeAccessIssue]
            raise InputError(
                f"`{ctx.command_path}` has no option {name}", hint=_option_hint(name, given, self.params)
            ) from None
        values, _, order = self.make_parser(ctx).parse_args(given)
        for option in {option.name: option for option in order}.values():
            times = sum(given_option.name == option.name for given_option in order)
            if isinstance(option, TyperOption) and times > 1 and not (option.multiple or option.is_flag):
                raise InputError(
                    f"{option.opts[0]} is given {times} times, and takes one value",
                    hint=f"keep one of them; {option.opts[0]} {values[option.name]} was the last",
                )
            is_option, given_value = isinstance(option, TyperOption), values.get(option.name)
            is_path = isinstance(ctx.params.get(option.name), Path)
            if given_value in ("", ("",), [""]) and (is_path or not is_option):
                name = option.opts[0] if is_option else option.metavar or option.opts[0]
                hint = (
                    "name a file or a folder" if is_path else "name one; a variable of the shell may be empty"
                )
                raise InputError(f"{name} is empty", hint=hint)
        return rest


class Verbs(TyperGroup):
    """Commands by name; an unknown one is refused in words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return _in_words(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before the command.

        Raises:
            InputError: there is no such option.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as wrong:
            if type(wrong).__name__ != "NoSuchOption":
                raise
            name: str = wrong.option_name  # pyright: ignore[reportAttributeAccessIssue]
            verb = next((word for word in given if word in self.commands), None)
            hint = f"options follow the command: {ctx.command_path} {verb} ... {name}"
            if verb is None:
                hint = f"name a command first: {', '.join(sorted(self.commands))}"
            raise InputError(f"`{ctx.command_path}` has no option {name}", hint=hint) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names.

        Raises:
            InputError: it names none.
        """
        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        hint = nearest_name(name, self.commands)
        if not near_names(name, self.commands) and "weigh" in self.commands:
            hint = f"write a command first, as {ctx.command_path} weigh {name} --on 8xH100; {hint}"
        raise InputError(f"`{ctx.command_path}` has no command {name!r}", hint=hint)


def _option_hint(name: str, given: Sequence[str], params: Iterable[Any]) -> str:
    from meshwright.registry import room  # outside the core

    return room("config_words").option_hint(name, given, params)


def _type_of(option: TyperOption) -> str:
    """Return what an option takes in a word; "" for a flag."""
    kind = option.type_descriptor
    if option.is_flag or kind.is_choice:
        return "" if option.is_flag else "|".join(map(str, kind.choices or ()))
    text = option.bare_type()
    return "NUMBER" if text in ("int", "float") or kind.is_ranged else "PATH" if kind.is_path else "TEXT"


def app_for(words: Sequence[str]) -> typer.Typer:
    """Return the command line as far as the words need it: of one verb, or of all.

    Only the module of the verb that the words begin with is imported. All are where they begin with none:
    for `--help`, for a shell that completes a word, and to name the verb that was meant.
    """
    app = typer.Typer(
        name="meshwright",
        cls=Verbs,
        context_settings={"help_option_names": HELP_NAMES},
        help="Know what a training run costs before the machines are rented, then run it.",
        epilog="CONFIG: a preset, a TOML file, a run's folder, or package.module:function. Every command has "
        "--json and --help, which shows an example.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    )
    app.callback()(_root)
    verbs = {verb: (panel, *found) for panel, table in PANELS.items() for verb, found in table.items()}
    wanted = words[:1] if words and words[0] in verbs else verbs
    for verb in wanted:
        panel, module, example = verbs[verb]
        found = getattr(import_module(f"meshwright.{module}"), verb)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb, rich_help_panel=panel)
        else:
            epilog = f"Example: meshwright {example}"
            app.command(verb, cls=Command, epilog=epilog, rich_help_panel=panel)(found)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"meshwright {version('meshwright')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Hold the options that need no verb."""


def main() -> None:
    """Run the command line and end the process with its exit status."""
    quiet_jax_plugins()
    with standard_streams():
        sys.exit(_status())


def _status() -> int:
    """Run the command line, report what went wrong, and return the exit status."""
    interrupts = _interrupts_noted()
    try:
        _check_text(sys.argv[1:])
        status = _status_of_app()
        sys.stdout.flush()
        return status
    except MeshwrightError as error:
        return _reported(error)
    except Exception as error:
        if interrupts:  # an import that Ctrl-C interrupts may fail in any way
            return EXIT_INTERRUPTED
        if isinstance(error, OSError) and (gone := _lost_working_folder()):
            return _reported(InputError(gone, hint="change to a folder that exists: cd ~"))
        if isinstance(error, OSError) and error.errno in REFUSALS:
            file = "" if error.filename is None else f" {error.filename}"
            what = f"the system refuses a file{file}: {error.strerror}"
            hint = "choose another place, or make room or give permission there"
            return _reported(MeshwrightError(what, hint=hint))
        from meshwright.trainer.launch import await_verdict, leave

        await_verdict()  # if a lost peer is the cause, this process ends here in its words
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        leave(words, EXIT_BROKE_OFF)
        return EXIT_BROKE_OFF


def _lost_working_folder() -> str:
    """Say that the working directory was deleted or may not be read; return "" if it is there."""
    try:
        os.getcwd()
    except OSError as refused:
        return f"the working directory of this command is gone: {refused.strerror}"
    return ""


def _reported(error: MeshwrightError) -> int:
    """Print the error and its hint to stderr, tell the run's other processes, and return the exit status."""
    print(f"error: {error.message}", file=sys.stderr)
    print(f"hint: {error.hint}", file=sys.stderr)
    from meshwright.trainer.launch import leave

    leave(error.message, error.exit_code)
    return error.exit_code


def _status_of_app() -> int:
    try:
        app_for(sys.argv[1:])(prog_name="meshwright")
    except SystemExit as ended:
        for note in _notes_of(ended):
            print(note, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    raise AssertionError("typer ends every command with SystemExit")


def _notes_of(ended: BaseException) -> list[str]:
    """Return what is noted on the Ctrl-C that ended a command, if one did: what it interrupted."""
    cause: BaseException | None = ended
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return [] if cause is None else list(getattr(cause, "__notes__", []))


def _interrupts_noted() -> list[int]:
    """Return a list that grows with each Ctrl-C; each also raises `KeyboardInterrupt`, as by default."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
        sys.unraisablehook = partial(_repeat_ctrl_c, sys.unraisablehook)
    return noted


def _repeat_ctrl_c(others: Callable[[Any], object], ignored: Any) -> None:
    """Send this process Ctrl-C again where the exception of one came to nothing.

    Python ignores what is raised in a finaliser or a callback of its collector, and jax has such a callback:
    without this a run would go on to its end.

    Args:
        others: is called with every other exception that Python ignores.
    """
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        others(ignored)
        return
    main = threading.main_thread().ident or 0
    again = threading.Timer(REPEAT_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
    again.daemon = True
    again.start()


def _check_text(arguments: Sequence[str]) -> None:
    """Raise an `InputError` if an argument is not UTF-8, or holds a zero byte."""
    for place, argument in enumerate(arguments, start=1):
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            what = f"argument {place}, {argument[:60]!a}, is not text in UTF-8"
            raise InputError(what, hint="rename the file, or give the text in UTF-8")
