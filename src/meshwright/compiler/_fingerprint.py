"""Digest a compiled program, so that the same program has the same digest wherever it was compiled.

A compiler with the GPU at hand and one without print one program differently. Names are numbered and
computations are listed in another order, and so are the operands of a fusion and of a sum by which arrays are
reduced. cuBLAS gets an algorithm that was found by timing, with a scratch array for it. The fields of a
backend's configuration have another order. None of these changes what the program computes, or how its arrays
lie in memory, apart from the scratch array. A digest leaves them out.

Each computation has a digest of its own, in which the digests of those that it calls stand for their names.
The program's digest is the one of its entry, with the line that describes the module.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_TABLES = re.compile(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*")
_METADATA = re.compile(r",? metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*\}")
_SCHEDULER_NOTE = re.compile(r"fingerprint_before_lhs=\"\w*\"")
_MODULE = re.compile(r"^HloModule [^,\n]*")
_PLACE = re.compile(r"/\*index=\d+\*/")
_HEADER = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(.*\{$")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_FUSION = re.compile(r" fusion\(([^)]*)\)(.*?calls=(%[\w.\-]+))")
_CALLED = re.compile(r"(?<=\w=)%[\w.\-]+|(?<=_computations=\{)[^}]*")  # the values of attributes
_NAME = re.compile(r"%[\w.\-]+")
_COMMUTES = re.compile(r"  ROOT %[\w.\-]+ = (\w+\[\]) (add|multiply|maximum|minimum|and|or)\(")
_SCRATCH = re.compile(r"\b[su]8\[\d+\]")
_USES_SCRATCH = (" custom-call(", " get-tuple-element(")
_CONFIG = "backend_config="
_TIMED = ("selected_algorithm", "autotune_workspace_size")
COMBINING_LINES = 3  # two numbers and their sum
_DECODER = json.JSONDecoder()


def fingerprint_of(program: str) -> str:
    """Return a digest of an optimised program's text, without the parts that do not affect the program.

    These are source positions, all names, the order of a fusion's operands, the algorithms of cuBLAS, and the
    scheduler's note of an earlier digest.

    >>> one = "HloModule one\\nENTRY %main (x: f32[2]) -> f32[2] {\\n  ROOT %x = f32[2] parameter(0)\\n}"
    >>> fingerprint_of(one) == fingerprint_of(one.replace("x", "y").replace("one", "another"))
    True
    """
    text = _TABLES.sub("\n", program)
    text = _SCHEDULER_NOTE.sub("", _METADATA.sub("", text))
    lines = _PLACE.sub("", _MODULE.sub("HloModule", text)).splitlines()
    fused = {found[3] for line in lines if (found := _FUSION.search(line))}
    known: dict[str, _Digested] = {}
    name, entry = "", ""
    inside, outside = list[str](), list[str]()
    for line in lines:
        if header := _HEADER.match(line):
            name, inside = header[2], []
            entry = name if header[1] else entry
        elif line == "}" and name:
            known[name] = _digested(inside, known, is_fused=name in fused)
            name = ""
        else:
            (inside if name else outside).append(line)
    whole = known[entry].digest if entry else ""
    return _hashed([*outside, whole])


@dataclass(frozen=True, slots=True)
class _Digested:
    """A computation's digest, and the numbers of its parameters in the order in which it lists them."""

    digest: str
    order: tuple[int, ...]


def _digested(lines: list[str], known: Mapping[str, _Digested], is_fused: bool) -> _Digested:
    """Digest the lines of a computation; those that it calls are known, for they are printed before it.

    Args:
        is_fused: whether a fusion calls it, so that its parameters may be numbered anew.
    """
    order = tuple(int(found[1]) for line in lines if (found := _PARAMETER.search(line)))
    if len(lines) == COMBINING_LINES and (combined := _COMMUTES.match(lines[-1])):
        return _Digested(_hashed([combined[1], combined[2]]), order)
    names: dict[str, str] = {}
    return _Digested(
        _hashed([_plain(line, names, known, order if is_fused else ()) for line in lines]), order
    )


def _plain(line: str, names: dict[str, str], known: Mapping[str, _Digested], order: tuple[int, ...]) -> str:
    """Return an instruction without what differs between prints of one program.

    Args:
        names: the numbers of the names that were met in its computation; new ones are added.
        order: of the parameters of a fused computation.
    """
    if order and (found := _PARAMETER.search(line)):
        line = f"{line[: found.start()]} parameter({order.index(int(found[1]))}){line[found.end() :]}"
    elif found := _FUSION.search(line):
        operands = found[1].split(", ")
        in_order = ", ".join(operands[place] for place in known[found[3]].order)
        line = f"{line[: found.start()]} fusion({in_order}){found[2]}{line[found.end() :]}"
    if any(each in line for each in _USES_SCRATCH):
        line = _SCRATCH.sub("s8[]", line)
    line = _CALLED.sub(lambda found: _NAME.sub(lambda name: known[name[0]].digest, found[0]), line)
    line = _NAME.sub(lambda found: names.setdefault(found[0], f"%{len(names)}"), line)
    return _sorted_config(line)


def _sorted_config(line: str) -> str:
    """Return an instruction with its backend's configuration in order, without the fields found by timing."""
    before, found, rest = line.partition(_CONFIG)
    if not found or not rest.startswith("{"):
        return line
    config, end = _DECODER.raw_decode(rest)
    return before + _CONFIG + json.dumps(_untimed(config), sort_keys=True) + rest[end:]


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(each) for key, each in value.items() if key not in _TIMED}
    return [_untimed(each) for each in value] if isinstance(value, list) else value


def _hashed(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
