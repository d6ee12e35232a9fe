"""Read what XLA says of a program: its reports, before it makes machine code, or why it compiled none.

Each is a file of the dump's folder, named after the module (`module_0001.jit_step.`), after the target, and
by a suffix. The program is there twice. The text is what the ledger reads. The protocol buffer is the program
as the executable would print it: the text abbreviates operands, and spells asynchronous calls otherwise.

Seen: XLA of jax 0.10.2 writes the files one after another, that of 0.12 several at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from meshwright.compiler import TEXTS
from meshwright.errors import CompileError

STEM = "after_optimizations"
SUFFIXES = dict(zip(TEXTS, (".txt", "-buffer-assignment.txt", "-live-range.txt"), strict=True))
MODULE_SUFFIX = ".hlo.pb"
HLO = "jaxlib._hlo"  # where jaxlib 0.10 and 0.12 keep XLA's own printer of modules
HOST_COLOR = 5  # of allocations in the host's memory, as XLA numbers memories of a GPU's program
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)", re.MULTILINE)
_MODULE_FIELD, _ASSIGNMENT_FIELD = 1, 3  # of XLA's HloProto
_LENGTH_DELIMITED = 2  # the only kind of field in a HloProto


def reports_in(dump: Path) -> dict[str, Path]:
    """Return the file of each report that a folder has, by its suffix. Module numbers are arbitrary."""
    files = sorted(dump.iterdir()) if dump.is_dir() else []
    found: dict[str, Path] = {}
    for suffix in (*SUFFIXES.values(), MODULE_SUFFIX):
        alike = [file for file in files if file.name.endswith(STEM + suffix)]
        assert len(alike) <= 1, f"{suffix}: {[file.name for file in alike]}"
        if alike:
            found[suffix] = alike[0]
    return found


def texts_in(dump: Path) -> dict[str, str]:
    """Return the dumped program, buffer assignment and live ranges, by their names in `TEXTS`."""
    found = reports_in(dump)
    missing = [suffix for suffix in SUFFIXES.values() if suffix not in found]
    assert not missing, f"{missing} of {sorted(path.name for path in dump.iterdir())[:20]}"
    return {name: found[suffix].read_text() for name, suffix in SUFFIXES.items()}


def are_written(dump: Path) -> bool:
    """Return whether all reports on the optimised program are there, and this process writes none of them.

    The compiler, a library in this process, opens each file once and closes it when it is whole.
    """
    found = reports_in(dump)
    if len(found) <= len(SUFFIXES):
        return False
    import psutil

    written = {Path(file.path).name for file in psutil.Process().open_files()}
    return written.isdisjoint(path.name for path in found.values())


@cache
def program_in(dump: Path) -> str:
    """Return the optimised program as its executable would print it.

    A protocol buffer of a module does not say how many partitions it is for; the first line of the text does.
    """
    found = reports_in(dump)
    fields = dict(_fields(found[MODULE_SUFFIX].read_bytes()))
    assert _ASSIGNMENT_FIELD in fields, f"{found[MODULE_SUFFIX].name} ends before the buffer assignment"
    module = import_module(HLO).HloModule.from_serialized_hlo_module_proto(fields[_MODULE_FIELD])
    with found[SUFFIXES[TEXTS[0]]].open() as text:
        header = text.readline()
    return header + module.to_string().partition("\n")[2]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and content of each field of a protocol buffer that holds messages alone."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        length, place = _varint(message, place)
        whole = tag & 7 == _LENGTH_DELIMITED and place + length <= len(message)
        assert whole, f"byte {place} of {len(message)}: a field of kind {tag & 7} with {length} bytes"
        yield tag >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the integer at a place of a protocol buffer, seven bits a byte, and the place after it."""
    value = shift = 0
    while message[place] & 0x80:
        value |= (message[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | message[place] << shift, place + 1


def bytes_in(assignment: str) -> dict[str, int]:
    """Return the sizes that the compiler's memory analysis would report, from a buffer assignment's text.

    They are its argument, output, alias and temp, with those in a GPU's host memory apart. Its peak is left
    out: it is no sum of sizes, and takes the larger of the device's and the host's temporaries for both.

    >>> text = "allocation 0: size 8, parameter 0, shape |f32[2]|, maybe-live-out:\\n"
    >>> bytes_in(text + "allocation 1: size 4, preallocated-temp:\\n")["alias"]
    8
    """
    names = ("argument", "output", "alias", "temp")
    found = {f"{where}{name}": 0 for where in ("", "host_") for name in names}
    for size, words in _ALLOCATION.findall(assignment):
        where = "host_" if re.search(rf"\bcolor {HOST_COLOR}\b", words) else ""
        is_argument, is_output = re.search(r"\bparameter \d", words), "maybe-live-out" in words
        held = (is_argument, is_output, is_argument and is_output, "preallocated-temp" in words)
        for name in (name for name, is_held in zip(names, held, strict=True) if is_held):
            found[f"{where}{name}"] += int(size)
    return found


class OutOfMemory(CompileError):
    """A device has too little memory for a program. `figures`: bytes needed and usable."""

    def __init__(self, message: str, words: str, figures: tuple[int, int]) -> None:
        super().__init__(message, hint="weigh it with a smaller batch, or on more devices")
        self.words, self.figures = words, figures


def could_not_compile(what: str, failed: Exception) -> CompileError:
    """Return the error for a compilation that failed.

    Args:
        what: the program, and perhaps its fleet.
        failed: what the compiler raised.
    """
    from meshwright.compiler import figures_of

    words = str(failed)
    message = f"XLA could not compile {what}: {words}"
    if (figures := figures_of(words)) is not None:
        return OutOfMemory(message, words.partition("\n")[0], figures)
    hint = "the compiler's words are above; `meshwright doctor` shows the versions in use"
    return CompileError(message, hint=hint)
