"""Digest a compiled program, so that the same program has the same digest wherever it was compiled.

A compiler with the GPU at hand and one without make the same kernels, and print them differently: names have
other numbers, the operands of a fusion another order, and independent instructions too. cuBLAS gets an
algorithm that was found by timing, with a scratch array for it. Triton's code of a Pallas kernel names the
files and lines that made it. So the digest is one of the data flow. Each
instruction has a digest of what it is and of its operands' digests, and a computation has one of all its
instructions. The order in which independent instructions run is no part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TABLES = re.compile(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*")
_METADATA = re.compile(r",? metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*\}")
_SCHEDULER_NOTE = re.compile(r"fingerprint_before_lhs=\"\w*\"")
_MODULE = re.compile(r"^HloModule [^,\n]*")
_PLACE = re.compile(r"/\*index=\d+\*/")
_HEADER = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?(%[\w.\-]+) = ")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_FUSION = re.compile(r" fusion\(([^)]*)\)(.*?calls=(%[\w.\-]+))")
_CALLED = re.compile(r"(?<=\w=)%[\w.\-]+|(?<=_computations=\{)[^}]*")  # the values of attributes
_NAME = re.compile(r"%[\w.\-]+")
_COMMUTES = re.compile(
    r"\s+ROOT %[\w.\-]+ = (\w+\[\]) (add|multiply|maximum|minimum|and|or)\((%[\w.\-]+), (?!\3\))"
)
_COMBINED = 2  # numbers, of which the only other line is the sum
_SCRATCH = re.compile(r"\b[su]8\[\d+\]")
_USES_SCRATCH = (" custom-call(", " get-tuple-element(")
_CONFIG = "backend_config="
_TIMED = ("selected_algorithm", "autotune_workspace_size")
_KERNEL = re.compile(r'(?<=\bir = )"(ML\\EFR(?:[^"\\]|\\.)*)"')  # Triton's code, as MLIR's bytecode
_ESCAPED = re.compile(rb"\\([0-9A-Fa-f]{2}|\\)")
_DEFAULTS: tuple[Any, ...] = (0, "", [], {}, None)  # False too
_DECODER = json.JSONDecoder()


def fingerprint_of(program: str) -> str:
    """Return a digest of an optimised program's text: of the module's first line, and of the data flow.

    Source positions, names, the order of independent instructions and the algorithms of cuBLAS do not count.

    >>> one = "HloModule one\\nENTRY %main (x: f32[2]) -> f32[2] {\\n  ROOT %x = f32[2] parameter(0)\\n}"
    >>> fingerprint_of(one) == fingerprint_of(one.replace("x", "y").replace("one", "another"))
    True
    """
    text = _TABLES.sub("\n", program)
    text = _KERNEL.sub(_kernel, _SCHEDULER_NOTE.sub("", _METADATA.sub("", text)))
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
    return _digest("\n".join([*outside, known[entry].digest if entry else ""]))


def _kernel(found: re.Match[str]) -> str:
    """Return the digest of a kernel's code without source positions, or the code if it cannot be read."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    code = _ESCAPED.sub(_unescaped, found[1].encode())
    with ir.Context() as context:
        dialect.register_dialect(context)
        try:
            return f'"{_digest(str(ir.Module.parse(code)))}"'
        except ir.MLIRError:
            return found[0]


def _unescaped(found: re.Match[bytes]) -> bytes:
    return found[1] if len(found[1]) == 1 else bytes.fromhex(found[1].decode())


@dataclass(frozen=True, slots=True)
class _Digested:
    """A computation's digest, and the numbers of its parameters in the order in which it lists them."""

    digest: str
    order: tuple[int, ...]


def _digested(lines: list[str], known: Mapping[str, _Digested], is_fused: bool) -> _Digested:
    """Digest a computation; those that it calls are known, for they are printed before it.

    Args:
        is_fused: whether a fusion calls it. Then its parameters are numbered as it lists them.
    """
    order = tuple(int(found[1]) for line in lines if (found := _PARAMETER.search(line)))
    combines = len(order) == _COMBINED == len(lines) - 1
    if combines and (combined := _COMMUTES.match(lines[-1])):
        return _Digested(_digest(f"{combined[1]} {combined[2]}"), order)
    digests: dict[str, str] = {}
    for line in lines:
        if found := _INSTRUCTION.match(line):
            plain = (found[1] or "") + _plain(line[found.end() :], known, order if is_fused else ())
            digests[found[2]] = _digest(_NAME.sub(lambda name: digests.get(name[0], ""), plain))
    return _Digested(_digest(" ".join(sorted(digests.values()))), order)


def _plain(instruction: str, known: Mapping[str, _Digested], order: tuple[int, ...]) -> str:
    """Return an instruction without what differs between prints of one program, but with its operands' names.

    Args:
        order: of the parameters of its computation, if that is a fused one.
    """
    text = instruction
    if order and (found := _PARAMETER.search(text)):
        text = f"{text[: found.start()]} parameter({order.index(int(found[1]))}){text[found.end() :]}"
    elif found := _FUSION.search(text):
        operands = found[1].split(", ")
        in_order = ", ".join(operands[place] for place in known[found[3]].order)
        text = f"{text[: found.start()]} fusion({in_order}){found[2]}{text[found.end() :]}"
    if any(each in text for each in _USES_SCRATCH):
        text = _SCRATCH.sub("s8[]", text)
    text = _CALLED.sub(lambda found: _NAME.sub(lambda name: _digest_of(name[0], known), found[0]), text)
    before, _, rest = text.partition(_CONFIG)
    try:
        config, end = _DECODER.raw_decode(rest)
    except json.JSONDecodeError:  # there is none, or that of a foreign call, which is no JSON
        return text
    return before + _CONFIG + json.dumps(_plain_value(config), sort_keys=True) + rest[end:]


def _digest_of(name: str, known: Mapping[str, _Digested]) -> str:
    """Return a called computation's digest; "" for a body that the text leaves out.

    Libtpu prints no bodies of asynchronous calls on TPU v7x. What they compute is named by the call itself.
    """
    return known[name].digest if name in known else ""


def _plain_value(value: Any) -> Any:
    """Return a value of a configuration without timed fields, and without those at their defaults.

    Only some compilers print defaults, whole numbers with a point, and large integers as text.
    """
    if isinstance(value, dict):
        kept = {key: _plain_value(each) for key, each in value.items() if key not in _TIMED}
        return {key: each for key, each in kept.items() if each not in _DEFAULTS}
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    if isinstance(value, str):
        return None if value.endswith("_INVALID") else int(value) if value.isdecimal() else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
