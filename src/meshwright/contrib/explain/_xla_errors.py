"""Read what XLA says when a device has too little memory, at compile time on TPUs and at run time on all.

A GPU's message has the sizes of the buffer assignment and the fifteen largest buffers at the peak. A TPU's
has the sizes of the program and its largest allocations. Both are often shortened to a sentence. Forms of
jaxlib 0.3 to 0.12 and of libtpu to 0.0.42.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.hlo import module_of, phase_of
from meshwright.units import format_bytes

from ._explanation import SIZE, Explanation, Held, Setting, size_of, summed
from ._log_window import Window, failed_at, place_words
from ._settings import settings_of

LONGEST_ENTRY = 16_000  # characters of one buffer in a list
WHOLE = "XLA's out-of-memory error"
_SPACE = re.compile(rf"[Rr]an out of memory in memory space (\w{{1,20}})\.\s+Used {SIZE} of {SIZE} \w+")
_TEMPORARIES = re.compile(rf"HLO temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)")
_CORES = re.compile(
    rf"TensorCore Hbm usage: {SIZE}, SparseCore Hbm usage:? {SIZE}, exceeding available bytes: {SIZE}"
)
_RUNTIME = re.compile(
    rf"Attempting to (?:reserve|allocate) {SIZE}[^.]{{0,60}}\. That was not possible\. "
    rf"There (?:are|is) {SIZE} free"
)
_ONE = re.compile(r"Allocation \(size=(\d{1,20})\) would exceed memory \(size=(\d{1,20})\)")
_SHAPE_OF_ONE = re.compile(r"\[shape = '([^'\n]{1,300})'")
_TRIED = re.compile(
    rf"(?:ut of memory while trying to allocate|Failed to allocate request for|trying to allocate) {SIZE}"
)
_PARTS = {
    "arguments": re.compile(rf"parameter allocation:\s+{SIZE}|\barguments\s+{SIZE}"),
    "constants": re.compile(rf"constant allocation:\s+{SIZE}"),
    "outputs": re.compile(rf"maybe_live_out allocation:\s+{SIZE}"),
    "temporaries": re.compile(rf"preallocated temp allocation:\s+{SIZE}|HLO temp\s+{SIZE}"),
    "global": re.compile(rf"\bglobal\s+{SIZE}"),
    "reserved by the runtime": re.compile(
        rf"Total hbm usage >= [^\n]{{1,40}}\n[^\n]{{0,200}}reserved\s+{SIZE}"
    ),
}
_TOTAL = re.compile(rf"total allocation:\s+{SIZE}")
_FRAGMENTS = re.compile(rf"total fragmentation:\s+{SIZE}|fragmentation \({SIZE}\)")
_OUTPUT = re.compile(rf"Output size {SIZE}; shares {SIZE} with arguments")
_POOL = re.compile(r"\bLimit:\s+(\d{1,20})\b")
_IN_USE = re.compile(r"\bInUse:\s+(\d{1,20})\b")
_LEAST = re.compile(rf"[Cc]an't reduce memory use below {SIZE}[^\n]{{0,60}}only reduced to {SIZE}")
_GPU_ENTRY = re.compile(r"\bBuffer \d{1,4}:\s")
_TPU_ENTRY = re.compile(r"(?:^|\s)\d{1,4}\. Size: ", re.MULTILINE)
_SIZE = re.compile(rf"\bSize: {SIZE}")
_UNPADDED = re.compile(rf"Unpadded size: {SIZE}")
_SHAPE = re.compile(r"(?:Entry Parameter Subshape|Shape): ([^\n]{1,400})")
_ARRAY = re.compile(r"[a-z][a-z0-9]{1,12}\[[\d,<=]*\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.){0,4000})"')
_SOURCE = re.compile(r'source_file="([^"\n]{1,1000})"(?:[^\n]{0,40}?source_line=(\d{1,9}))?')
_LABEL = re.compile(r"XLA [Ll]abel: %?([\w.-]{1,100})")
_KIND = re.compile(r"Allocation type: ([\w ]{1,40})")
_PHASES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "recompute": "recomputation",
    "optimizer": "optimizer",
}


def xla_error(path: str, window: Window) -> Explanation | None:
    """Return what XLA's message says; None if the window has none."""
    text = window.text
    figures = _verdict(text)
    held, padding = _buffers(text)
    parts = _parts(text)
    asked = _size(_TRIED, text)
    if figures is None and asked is None and not held:
        return None
    total = _size(_TOTAL, text)
    place, function = failed_at(window)
    pool, in_use = (None if m is None else int(m[1]) for m in (_POOL.search(text), _IN_USE.search(text)))
    needed, usable, what = figures or (total, pool, "the program" if total else "")
    missing = None if needed is None or usable is None or figures is None else needed - usable
    if figures is None and asked is not None:
        if pool is not None and in_use is not None:
            missing = max(0, asked - max(0, pool - in_use)) or None
        parts["asked for when it failed"] = asked
    if (space := _SPACE.search(text)) and space[1] != "hbm":
        what = f"a kernel, in the chip's own {space[1]} memory,"
    return Explanation(
        path=path,
        kind=WHOLE,
        lead=_lead(what, needed, usable, asked, place, function),
        needed_bytes=needed,
        usable_bytes=usable,
        missing_bytes=missing,
        parts=parts,
        held=held,
        held_of="the largest buffers at the peak, as XLA lists them",
        settings=(
            *settings_of(
                held,
                missing,
                fragments=_size(_FRAGMENTS, text),
                padding=padding,
                undonated=_undonated(text, total, parts),
            ),
            *_of_pool(text, held),
        ),
        notes=tuple(_notes(text, held)),
    )


def _verdict(text: str) -> tuple[int | None, int | None, str] | None:
    """Return the bytes needed and usable that the message names, and whose they are; else None."""
    if found := _CORES.search(text):
        cores = [size_of(found[n], found[n + 1]) for n in (1, 3)]
        usable = size_of(found[5], found[6])
        return sum(each or 0 for each in cores), usable, "the program, on TensorCore and SparseCore together,"
    if found := _ONE.search(text):
        shape = _SHAPE_OF_ONE.search(text, found.end())
        one = f"one array, {_array(shape[1])}," if shape else "one array"
        return size_of(found[1], ""), size_of(found[2], ""), one
    if found := _RUNTIME.search(text):
        return size_of(found[1], found[2]), size_of(found[3], found[4]), "what is loaded next"
    if found := _SPACE.search(text):
        return size_of(found[2], found[3]), size_of(found[4], found[5]), "the program"
    if found := _TEMPORARIES.search(text):
        return size_of(found[1], found[2]), size_of(found[3], found[4]), "the program"
    return None


def _lead(
    what: str, needed: int | None, usable: int | None, asked: int | None, place: str, function: str
) -> str:
    called = f"{place} ({function}): " if place else ""
    if needed is not None and usable is not None:
        return (
            f"{called}{what or 'the program'} needs {format_bytes(needed)} where {format_bytes(usable)} are"
        )
    if needed is not None:
        could_not = "" if asked is None else f", and {format_bytes(asked)} of it could not be had"
        return f"{called}{what or 'the program'} needs {format_bytes(needed)}{could_not}"
    if asked is not None:
        return f"{called}XLA asked for {format_bytes(asked)} more than the device had free"
    return f"{called}XLA ran out of a device's memory, and the message has no total"


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    """Return the first amount that a pattern finds, in whichever of its alternatives."""
    found = pattern.search(text)
    if found is None:
        return None
    at = next(n for n in range(1, len(found.groups()) + 1, 2) if found[n] is not None)
    return size_of(found[at], found[at + 1])


def _parts(text: str) -> dict[str, int]:
    sizes = {name: _size(pattern, text) for name, pattern in _PARTS.items()}
    return {name: size for name, size in sizes.items() if size}


def _undonated(text: str, total: int | None, parts: dict[str, int]) -> int | None:
    """Return the bytes of outputs that share no memory with arguments although they could; None if unknown.

    XLA counts an output in an argument's place among both, so that the parts are more than the total by it.
    """
    if found := _OUTPUT.search(text):
        output, shared = size_of(found[1], found[2]), size_of(found[3], found[4])
        return None if output is None or shared is None else min(output - shared, parts.get("arguments", 0))
    if total is None or "arguments" not in parts or "outputs" not in parts:
        return None
    names = ("arguments", "constants", "outputs", "temporaries")
    shared = max(0, sum(parts.get(name, 0) for name in names) - total)
    return min(parts["outputs"], parts["arguments"]) - shared


def _buffers(text: str) -> tuple[tuple[Held, ...], int]:
    """Return the buffers of the first list in a text, and the bytes that a TPU's layout pads them with."""
    for mark, entry in (("Peak buffers:", _GPU_ENTRY), ("Largest program allocations in", _TPU_ENTRY)):
        start = text.find(mark)
        if start < 0:
            continue
        again = text.find(mark, start + len(mark))  # of another rank, or of the next attempt
        body = text[start : again if again > 0 else len(text)]
        begins = [match.start() for match in entry.finditer(body)]
        pieces = [
            body[at : min(end, at + LONGEST_ENTRY)]
            for at, end in zip(begins, [*begins[1:], len(body)], strict=True)
        ]
        made = [found for piece in pieces if (found := _buffer(piece)) is not None]
        return summed(each for each, _ in made), sum(padding for _, padding in made)
    return (), 0


def _buffer(piece: str) -> tuple[Held, int] | None:
    """Return one entry of a list with its padding; None if it was cut off before its size and shape."""
    size, shape = _size(_SIZE, piece), _SHAPE.search(piece)
    if size is None:
        return None
    operator, source, kind = _OP_NAME.search(piece), _SOURCE.search(piece), _KIND.search(piece)
    name = "" if operator is None else operator[1].replace('\\"', '"').replace("\\'", "'")
    label = _LABEL.search(piece)
    unpadded = _size(_UNPADDED, piece)
    held = Held(
        num_bytes=size,
        what=_array(shape[1]) if shape else label[1] if label else "a buffer",
        place=place_words(source[1], int(source[2] or 0)) if source else "",
        category=_category(piece, name, "" if kind is None else kind[1].strip()),
        module=module_of(name) or (name if "/" not in name else ""),
    )
    return held, 0 if unpadded is None else max(0, size - unpadded)


def _array(shape: str) -> str:
    """Return a shape without its layout; one of a tuple is cut short."""
    found = _ARRAY.match(shape.strip())
    return found[0] if found else shape.strip()[:60]


def _category(piece: str, name: str, kind: str) -> str:
    if "Entry Parameter Subshape" in piece or kind.lower().startswith("argument"):
        return "argument"
    if not name:
        return ""
    return _PHASES.get(phase_of(name), "forward pass" if "jvp" in name else "")


def _of_pool(text: str, held: tuple[Held, ...]) -> Iterator[Setting]:
    if "_bfc" in text or "BFC" in text:
        yield Setting(
            change="XLA_PYTHON_CLIENT_MEM_FRACTION=0.92",
            saved_bytes=None,
            why="JAX takes 75 % of a GPU unless this says otherwise; look whether the rest is free",
        )
    yield Setting(
        change="meshwright weigh module.py:step --on FLEET",
        saved_bytes=None,
        why="compiles the step without the device, and says what its memory holds",
    )


def _notes(text: str, held: tuple[Held, ...]) -> Iterator[str]:
    if found := _LEAST.search(text):
        below, reached = size_of(found[1], found[2]), size_of(found[3], found[4])
        if below is not None and reached is not None:
            yield (
                f"XLA's own rematerialisation wanted {format_bytes(below)} and came down to "
                f"{format_bytes(reached)}: it cannot save more"
            )
    if not held or not any(each.place for each in held):
        yield (
            "the message names no source line: XLA_FLAGS=--xla_dump_to=FOLDER on the same run writes the "
            "program, and `meshwright explain FOLDER` names them"
        )
