"""Render a chat template, in a process with limits of processor time, memory and output.

A template is a program of whoever published a model. It runs in Jinja's sandbox, which keeps it from Python's
insides, but not from running for ever or from filling the memory. `_templates` starts this file by its path,
so that it imports nothing of Meshwright, writes a request a line to it, and reads an answer a line.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.sandbox

MEMORY_BYTES = 2**29  # beyond what the process has when it begins
MOST_CHARACTERS = 2**24  # of one text
MOST_WORDS = 300  # of an error, in characters


def main() -> None:
    """Answer requests until there are no more. The first holds the template."""
    _limit_memory()
    first = json.loads(sys.stdin.buffer.readline())
    template: list[jinja2.Template] = []

    def compile_it() -> list[str]:
        template.append(_compiled(first["template"]))
        return []

    _answer(compile_it, first["cpu_seconds"])
    for line in sys.stdin.buffer:
        _answer(
            lambda line=line: _texts(template[0], first["special"], **json.loads(line)), first["cpu_seconds"]
        )


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _answer(work: Callable[[], list[str]], cpu_seconds: float) -> None:
    """Write the texts that `work` returns, or its error in words."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF then ends this process, also within C
    try:
        answer: dict[str, Any] = {"texts": work()}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        answer = {"error": "it calls itself without end, or is nested too deeply"}
    except jinja2.TemplateError as refused:
        answer = {"error": str(refused)[:MOST_WORDS]}
    except Exception as failed:  # any of Python's: the template decides what is called, and with what
        answer = {"error": f"{type(failed).__name__}: {failed}"[:MOST_WORDS]}
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _compiled(text: str) -> jinja2.Template:
    """Return a template, in the sandbox and with the functions that `transformers` gives it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _texts(
    template: jinja2.Template, special: dict[str, str], messages: list[Any], parts: list[tuple[int, bool]]
) -> list[str]:
    """Return the text of the first `count` messages, for each `count, begins_answer` of `parts`."""
    return [_text(template, special, messages[:count], begins_answer) for count, begins_answer in parts]


def _text(
    template: jinja2.Template, special: dict[str, str], messages: list[Any], begins_answer: bool
) -> str:
    pieces: list[str] = []
    length = 0
    for piece in template.generate(messages=messages, add_generation_prompt=begins_answer, **special):
        length += len(piece)
        if length > MOST_CHARACTERS:
            raise jinja2.TemplateError(f"it writes more than {MOST_CHARACTERS:,} characters")
        pieces.append(piece)
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError as half:
        wrong = f"\\u{ord(text[half.start]):04x}"
        raise jinja2.TemplateError(f"it writes half of a pair, {wrong}, which is not a character") from None
    return text


if __name__ == "__main__":
    main()
