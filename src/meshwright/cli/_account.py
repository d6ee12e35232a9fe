"""`meshwright account`."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.errors import InputError, MeshwrightError

from ._console import JsonFlag, phases, print_json, show

if TYPE_CHECKING:
    from meshwright.eager import Account


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
    """Memory and FLOPs of one eager training step of a PyTorch module on one device, without computing it."""
    from multiprocessing import resource_tracker

    from meshwright.children import ending_descendants

    resource_tracker.ensure_running()  # multiprocessing keeps it for all: not to be ended
    with ending_descendants(), phases(f"accounting {function}"):
        found = _account_apart(function)
    if as_json:
        print_json(found.to_dict())
    else:
        from meshwright.report import account_text

        show(account_text(found))


def _account_apart(function: str) -> Account:
    """Account for what `function` makes in a process of its own, which it may end or crash.

    Raises:
        InputError: as `account_function`; or the process ended without an answer.
    """
    from meshwright.children import safe_path

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", prefix="meshwright-account-") as crash:
        child = context.Process(target=_answer, args=(theirs, function, os.getcwd(), crash.name))
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is this process's alone
        try:
            with safe_path():
                child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        try:
            answer: Account | MeshwrightError | str = ours.recv()
        except EOFError:
            child.join()
            raise _ended(function, child.exitcode or 0, crash.read()) from None
        finally:
            child.terminate()
            child.join()
    if isinstance(answer, MeshwrightError):
        raise answer
    if isinstance(answer, str):
        raise RuntimeError(f"in the process that accounts for {function}:\n{answer}")
    return answer


def _ended(function: str, status: int, crash: str) -> InputError:
    """The process of `function` ended by itself; `crash` is what faulthandler wrote, if it crashed."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    line = next((line.strip() for line in crash.splitlines() if line.startswith("  File ")), "")
    return InputError(
        f"{function}, or what it calls, ended its process: it {how}" + (f" at {line}" if line else ""),
        hint="take os._exit out of it, or run it by itself to see where it crashes",
    )


def _answer(answers: Connection, function: str, folder: str, crash: str) -> None:
    """Send the account of `function`, or what went wrong; what it prints goes to stderr."""
    os.dup2(2, 1)
    with open(crash, "w") as file:
        faulthandler.enable(file)
        from meshwright.eager import account_function

        try:
            answers.send(account_function(function, search_path=(folder,)))
        except MeshwrightError as error:
            answers.send(error)
        except Exception:
            answers.send(traceback.format_exc())
        except BaseException as ended:  # Ctrl-C does not come here: it is the function's own
            what = f"{function}, or what it calls, raised {type(ended).__name__}"
            answers.send(InputError(what, hint="raise an Exception for what goes wrong"))
