"""Read what XLA dumped of a program: which values live at the peak, by source line and category.

`XLA_FLAGS=--xla_dump_to=FOLDER` writes the optimised program, its buffer assignment and its live ranges for
each module. The ledger reads them, as it does for a weighing. Here the arguments are known by their paths
alone, and the categories are those of a foreign program. Of several modules, the one that takes most memory
is explained.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from meshwright.compiler import SIMULATED, Argument, Compiled, TracedFlops
from meshwright.errors import InputError
from meshwright.files import read_bytes, reason
from meshwright.hardware import Fleet
from meshwright.hlo import Program, parse_program
from meshwright.ledger import MemoryLedger, memory_of, parse_assignment
from meshwright.units import format_bytes

from ._explanation import MOST_BYTES, Explanation, Held, Setting, summed
from ._settings import settings_of

KIND = "dump of XLA"
HINT = (
    "dump the run that fails: XLA_FLAGS=--xla_dump_to=FOLDER, with "
    "JAX_ENABLE_COMPILATION_CACHE=false, because of a program from its cache JAX dumps no buffers"
)
MOST_TEXT_BYTES, MOST_FILES = 2**29, 200_000
STEM = "after_optimizations"
PROGRAM, ASSIGNMENT, RANGES = f"{STEM}.txt", f"{STEM}-buffer-assignment.txt", f"{STEM}-live-range.txt"
_TOTAL = re.compile(r"^allocation \d+: size (\d{1,19}),", re.MULTILINE)
_PART_OF_STATE = re.compile("param|opt|ema|step|rng|key", re.IGNORECASE)
_NAME = re.compile(r"(?:module_\d+\.)?(.*?)(?:\.cl_\d+)?\.(?:sm_[\w.]+_|gfx\w+_)?(?:cpu_|gpu_)?$")


@dataclass(frozen=True, slots=True)
class _Module:
    """One program of a dump: what its files' names begin with, and the bytes of its allocations."""

    stem: str
    num_bytes: int

    @property
    def name(self) -> str:
        """The name of the jitted function, as XLA has it."""
        found = _NAME.match(self.stem)
        return found[1] if found else self.stem


def dump_folder(folder: Path, on: Fleet | None = None, only: str = "") -> Explanation:
    """Return what a dump says of its largest program.

    Args:
        folder: the folder.
        on: the devices that it is for, whose memory it is compared with.
        only: what the names of one program's files begin with, to "after_optimizations"; "" for all programs.

    Raises:
        InputError: no program of the folder has all of its files, or they cannot be read.
    """
    modules = _modules(folder, only)
    largest = modules[0]
    texts = [_text(folder / f"{largest.stem}{suffix}") for suffix in (PROGRAM, ASSIGNMENT, RANGES)]
    try:
        program = parse_program(texts[0])
        fleet = on or Fleet.parse("1xCPU")
        compiled = _record(largest, program, fleet)
        memory = memory_of(program, texts[1], texts[2], compiled, fleet)
        undonated = _undonated(texts[1])
    except Exception as wrong:  # a stranger's text may be anything
        what = f"the dump of {largest.name} in {folder} cannot be read: {type(wrong).__name__}: {wrong}"
        raise InputError(what, hint=HINT) from wrong
    stored = {"outputs", *(argument.role.replace("_", " ") for argument in compiled.arguments)}
    return _explained(folder, modules, memory, undonated, stored, on)


def _modules(folder: Path, only: str) -> list[_Module]:
    """Return the programs whose three files are there, the largest first."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError as refused:
        what = f"{folder} cannot be read: {reason(refused)}"
        raise InputError(what, hint="name a folder that exists and can be read") from None
    if len(names) > MOST_FILES:
        what = f"{folder} has {len(names):,} files, and {MOST_FILES:,} are looked at"
        raise InputError(what, hint="name the -buffer-assignment.txt file of one program")
    there = set(names)
    stems = [name.removesuffix(ASSIGNMENT) for name in names if name.endswith(ASSIGNMENT)]
    whole = [stem for stem in stems if only in ("", stem) and {stem + PROGRAM, stem + RANGES} <= there]
    if not whole:
        parts = f"{len(stems)} without their program or live ranges" if stems and not only else "none"
        what = f"{folder} has no buffer assignment of XLA that is complete: {parts}"
        raise InputError(what, hint=HINT)
    made = [
        _Module(stem, sum(map(int, _TOTAL.findall(_text(folder / f"{stem}{ASSIGNMENT}"))))) for stem in whole
    ]
    return sorted(made, key=lambda each: (-each.num_bytes, each.stem))


def _text(path: Path) -> str:
    try:
        return read_bytes(path, MOST_TEXT_BYTES).decode("utf-8", "replace")
    except OSError as refused:
        what = f"{path} cannot be read: {reason(refused)}"
        raise InputError(what, hint=HINT) from None


def _record(module: _Module, program: Program, fleet: Fleet) -> Compiled:
    """Return the record of a compilation of which only the texts are known."""
    arguments = tuple(
        Argument(
            path=parameter.op_name,
            role=_role(parameter.op_name),
            shape=parameter.arrays[0].dims,
            dtype=parameter.arrays[0].dtype,
            device_bytes=parameter.num_bytes,
            replicated=False,
        )
        for parameter in program.entry.parameters
        if parameter.arrays
    )
    is_gpu = module.stem.endswith("gpu_")
    return Compiled(
        schema=1,
        name=module.name,
        source=SIMULATED,
        fleet=fleet.name,
        platform="cuda" if is_gpu else "cpu" if module.stem.endswith("cpu_") else "tpu",
        num_devices=1,
        mesh_axes=(),
        compiler="",
        versions={},
        options={},
        arguments=arguments,
        traced_flops=TracedFlops(by_phase={}, unpriced=(), attention=0),
        num_parameters=None,
        num_matmul_parameters=None,
        tokens_per_step=None,
        sequence_length=None,
        reported_bytes={},
        compile_seconds=0.0,
        fingerprint="",
    )


def _role(path: str) -> str:
    """Return what an argument is by its path: its name, and the part of a state that it is in.

    >>> _role("state.opt_state[0].mu['up']"), _role("params['up']"), _role("")
    ('state opt_state', 'params', 'arguments')
    """
    name, *rest = [part for part in re.split(r"[\[\].']+", path) if part] or ["arguments"]
    return f"{name} {rest[0]}" if rest and _PART_OF_STATE.search(rest[0]) else name


def _undonated(assignment: str) -> int:
    """Return the bytes of results for each of which an argument of the same size is not given up."""
    allocations = parse_assignment(assignment)
    results = Counter(a.num_bytes for a in allocations if a.kind == "output")
    shared = {a.parameter for a in allocations if a.kind == "parameter" and len(a.values) > 1}
    arguments = Counter(
        a.num_bytes for a in allocations if a.kind == "parameter" and a.parameter not in shared
    )
    return sum(size * count for size, count in (results & arguments).items())


def _explained(
    folder: Path,
    modules: list[_Module],
    memory: MemoryLedger,
    undonated: int,
    stored: set[str],
    on: Fleet | None,
) -> Explanation:
    largest, total = modules[0], memory.reserved_bytes
    if total > MOST_BYTES:
        raise InputError(f"the dump of {largest.name} in {folder} has {total:,} bytes", hint=HINT)
    held = summed(
        Held(
            num_bytes=each.num_bytes,
            what=each.shape,
            place=each.source_line,
            category=each.category.replace("_", " "),
            module=each.module or (each.operation if "/" not in each.operation else ""),
        )
        for each in memory.buffers
    )
    usable = None if memory.usable_bytes is None else memory.usable_bytes - memory.allowance_bytes
    missing = None if usable is None else total - usable
    where = "" if on is None or usable is None else f" where a device of {on.name} has {format_bytes(usable)}"
    notes: list[str] = []
    if len(modules) > 1:
        second = f"{modules[1].name} with {format_bytes(modules[1].num_bytes)}"
        notes.append(f"the folder has {len(modules):,} programs; this one takes most, then {second}")
    if usable is None:
        notes.append("a dump does not say what a device has: --on 8xH100 compares it")
    if memory.host_bytes:
        notes.append(f"it takes {format_bytes(memory.host_bytes)} of the host's memory besides")
    return Explanation(
        path=str(folder),
        kind=KIND,
        lead=f"{largest.name} needs {format_bytes(total)}{where}",
        needed_bytes=total,
        usable_bytes=usable,
        missing_bytes=missing,
        parts={name.replace("_", " "): size for name, size in memory.by_category.items()},
        held=held,
        held_of="what lives at the peak",
        settings=(
            *settings_of(
                held,
                missing,
                fragments=memory.by_category.get("fragmentation"),
                undonated=undonated,
                stored=stored,
            ),
            Setting(
                change="meshwright weigh module.py:step --on FLEET",
                saved_bytes=None,
                why="compiles the step for a device that is not at hand",
            ),
        ),
        notes=tuple(notes),
    )
