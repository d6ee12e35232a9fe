"""Find the chat template of a model's folder, and render conversations with it.

A template is a program of a stranger: `_template_process` runs it, in a process of its own with limits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.extras import how_to_install
from meshwright.files import read_text, reason
from meshwright.subprocesses import own_python

_PROGRAM = Path(__file__).with_name("_template_process.py")
_MOST_BYTES = 2**20  # of a template; published ones have up to 20 thousand
CPU_SECONDS = 5.0  # for a conversation, which takes about a millisecond
_PIPE_BYTES = 2**16
_WALL_SECONDS = 300.0  # for the same, on a machine with much else to do
_WITHOUT = "use lines of prompt and completion"


def template_text(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template of a model's folder; None if it has none.

    It is in `chat_template.jinja`, or under `chat_template` in `settings`: one, or several by name.

    Raises:
        InputError: it is no text, or its file cannot be read.
    """
    beside = folder / "chat_template.jinja"
    if beside.exists():
        try:
            return read_text(beside, _MOST_BYTES)
        except (OSError, ValueError) as broken:
            raise InputError(f"{beside} cannot be read: {reason(broken)}", hint=_WITHOUT) from broken
    found = settings.get("chat_template")
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    for each in named:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            what = f"{str(each)[:40]} is no object with a name and a template"
            raise InputError(f"{folder}/tokenizer_config.json: in chat_template, {what}", hint=_WITHOUT)
        if each["name"] == "default" and isinstance(text := each.get("template"), str | None):
            if text is None and isinstance(found, list):
                continue
            return text
        if each["name"] == "default":
            what = f"{folder}/tokenizer_config.json: chat_template = {str(found)[:40]} is not text"
            raise InputError(what, hint=_WITHOUT)
    return None


class ChatTemplate:
    """A chat template that renders conversations, in a process that ends with this object.

    Args:
        text: the template.
        special: special tokens by their names in a template.
        folder: where it came from, for errors.

    Raises:
        InputError: `jinja2` is not installed, or the template cannot be read.
    """

    def __init__(self, text: str, special: Mapping[str, str], folder: Path) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise InputError(
                f"{folder}: a chat template needs the package jinja2, which is not installed",
                hint=f"{how_to_install('tokenizers')}, or {_WITHOUT}",
            )
        self._folder = folder
        self._process = subprocess.Popen(
            own_python(str(_PROGRAM)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, self._process)
        self._cpu_seconds = CPU_SECONDS
        answer = self._ask({"template": text, "special": dict(special), "cpu_seconds": CPU_SECONDS})
        if "error" in answer:
            what = f"the chat template of {folder} cannot be read: {answer['error']}"
            raise InputError(what, hint=_WITHOUT)

    def texts(self, messages: Sequence[Mapping[str, Any]], parts: Sequence[tuple[int, bool]]) -> list[str]:
        """Return the texts of beginnings of a conversation.

        Args:
            messages: the whole conversation.
            parts: for each text the number of messages, and whether an answer's beginning is to follow.

        Raises:
            InputError: the template refuses the conversation, fails, or passes a limit.
        """
        answer = self._ask({"messages": list(messages), "parts": list(parts)})
        if "error" in answer:
            raise InputError(
                f"the chat template of {self._folder} refuses a conversation: {answer['error']}",
                hint="leave it out, or write it as the template asks",
            )
        return answer["texts"]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; of a process that ended, the reason as its error."""
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        if line := self._line():
            return json.loads(line)
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return {"error": f"it takes more than {self._cpu_seconds:g} s of processor time"}
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return {"error": f"its process ended ({how})"}

    def _line(self) -> bytes:
        """Return the next line of the process; empty if it has ended.

        Raises:
            MeshwrightError: nothing comes, although the process has used little of the processor.
        """
        assert self._process.stdout is not None, "it is a pipe"
        pieces: list[bytes] = []
        deadline = time.monotonic() + _WALL_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not (pieces and pieces[-1].endswith(b"\n")):
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    self._process.kill()
                    raise MeshwrightError(
                        f"the chat template of {self._folder} has no answer after {_WALL_SECONDS:.0f} s",
                        hint="run it again when the machine has less to do",
                    )
                if not (piece := os.read(self._process.stdout.fileno(), _PIPE_BYTES)):
                    return b""
                pieces.append(piece)
        return b"".join(pieces)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "both are pipes"
        with suppress(OSError):  # of what the process has not read
            pipe.close()
