"""Call a user's function that makes a module in a process of its own, which the function may end or crash.

`python -m meshwright.contrib.torch_eager._account_process PARENT_PID FOLDER` is that process for an account
on a mesh; `torch_as_jax` has another one. It reads FOLDER/request.json, writes its phases to FOLDER/phases,
and FOLDER/answer.json last. torch is imported there alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshwright.config import Layout
from meshwright.eager import EagerAccount
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import last_lines, parsed_json
from meshwright.hardware import Fleet
from meshwright.json_records import read_record
from meshwright.sandbox import LAST_LINES, TIME_LIMIT_SECONDS, how_it_ended, start, wait
from meshwright.subprocesses import (
    begin_phase,
    end_after,
    from_child,
    guard,
    report_phases,
    spoiled,
    working_folder,
)

Request = TypeVar("Request")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRequest:
    """A function, its arguments as text, the program's name, and the fleet and mesh of the account."""

    function: str
    name: str
    fleet: Fleet
    layout: Layout
    knobs: dict[str, str]
    search_path: tuple[str, ...]


def account_named(
    function: str,
    *,
    name: str,
    fleet: Fleet,
    layout: Layout,
    knobs: Mapping[str, str],
    on_phase: Callable[[str], None],
) -> EagerAccount:
    """Return the account of the module that a function returns, "package.module:function".

    Args:
        name, fleet, layout: as for `account_on_mesh`.
        knobs: arguments of the function by name, as text.
        on_phase: called with the name of each part of the work.

    Raises:
        InputError: as `account_on_mesh`; or the function does not exist, fails, or ends its process.
    """
    from pydantic import TypeAdapter

    request = AccountRequest(
        function=function,
        name=name,
        fleet=fleet,
        layout=layout,
        knobs=dict(knobs),
        search_path=(os.getcwd(),),
    )
    answer = answer_apart(__name__, TypeAdapter(AccountRequest).dump_json(request), name, on_phase)
    return EagerAccount.from_json(text_in(answer, "account"))


def answer_apart(
    server: str,
    request: bytes,
    function: str,
    on_phase: Callable[[str], None],
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> Any:
    """Run a request in a child process, and return its answer.

    Args:
        server: the name of the module that it runs, which calls `serve`.
        request: its text as JSON.
        function: the user's function that it calls, for messages.
        on_phase: called with the name of each part of the work.
        time_limit_seconds: the time that the process may take.

    Raises:
        InputError: the answer is an error, the process ended without one, or took too long.
    """
    with working_folder("meshwright-torch-") as folder:
        (folder / "request.json").write_bytes(request)
        phases: list[str] = []

        def report() -> None:
            phases[:] = report_phases(folder, on_phase, len(phases))

        status = wait(start(server, folder, said=folder / "said"), time_limit_seconds, report)
        if status is None:
            phase = phases[-1] if phases else "starting"
            raise InputError(
                f"{function} was not done after {time_limit_seconds:.0f} s ({phase})",
                hint="run it by itself to see what it waits for, or let it make a smaller module",
            )
        return _answer(function, status, folder)


def _answer(function: str, status: int, folder: Path) -> Any:
    """Return the answer; raise its error, or an error that the process ended without an answer."""
    file = folder / "answer.json"
    if (text := from_child(file)) is not None:
        try:
            answer: dict[str, Any] = dict(parsed_json(text))
            error = InputError(answer["message"], hint=answer["hint"]) if "message" in answer else None
        except (ValueError, TypeError, KeyError) as wrong:
            raise spoiled(file, "it is no answer") from wrong
        if error is not None:
            raise error
        return answer
    said = last_lines(folder / "said", LAST_LINES)
    words = "".join(f"\n    {line}" for line in said)
    raise InputError(
        f"{function}, or what it calls, ended its process, which {how_it_ended(status)}"
        + (f". Its last words:{words}" * bool(said)),
        hint="run it by itself to see where it ends",
    )


def text_in(answer: Mapping[str, Any], part: str) -> str:
    """Return the text of a part of an answer.

    Raises:
        InputError: there is none: the user's code has changed the answer.
    """
    text = answer.get(part)
    if not isinstance(text, str):
        raise InputError(
            f"the answer of the function's process has no {part}",
            hint="let the function, and what it calls, write and delete only files of its own",
        )
    return text


def serve(
    parent: int,
    folder: Path,
    kind: type[Request],
    answer_to: Callable[[Request, Callable[[str], None]], Mapping[str, Any]],
) -> None:
    """Answer the request in `folder`. Every error that the user can act on becomes an answer."""
    guard(parent)
    faulthandler.enable()
    request = read_record(kind, (folder / "request.json").read_text(), name="a request", hint="report it")

    try:
        answer = dict(answer_to(request, partial(begin_phase, folder)))
    except MeshwrightError as error:
        answer = {"message": error.message, "hint": error.hint}
    part = folder / "answer.part"
    part.write_text(json.dumps(answer))
    part.rename(folder / "answer.json")


def _account(request: AccountRequest, on_phase: Callable[[str], None]) -> dict[str, str]:
    from ._module_function import parts_of_function, require_torch

    on_phase("importing torch")
    require_torch()
    from ._mesh_step import account_on_mesh

    on_phase("making the module")
    parts = parts_of_function(request.function, request.search_path, request.knobs)
    inputs, keyword_inputs = parts.pop("inputs"), parts.pop("keyword_inputs")
    account = account_on_mesh(
        parts.pop("module"),
        inputs,
        keyword_inputs,
        name=request.name,
        fleet=request.fleet,
        layout=request.layout,
        on_phase=on_phase,
        **parts,
    )
    return {"account": account.to_json()}


if __name__ == "__main__":
    end_after(lambda: serve(int(sys.argv[1]), Path(sys.argv[2]), AccountRequest, _account))
