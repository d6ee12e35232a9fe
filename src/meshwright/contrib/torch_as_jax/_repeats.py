"""Find repeated blocks of an exported module that can run as one loop over their stacked parameters.

A *unit* is one or more segments that follow one another, such as a decoder layer, or a local and a global
layer. Units that follow one another are one loop if their operations are equal and their values from outside
are of four kinds: the same in all of them, a parameter or buffer of each one's own, or what the unit before
hands on. All else stays as it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._module_program import ArraySpec, GraphSegment, GraphValue, ModuleProgram, Operation, reads_of

LONGEST_UNIT = 12  # segments
Names = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Units that run as one loop, by the names that the first of them has for its values.

    first, length: the place of the first segment, and the number of segments of all units.
    unit: the segments of the first unit.
    count: the number of units.
    parameters: placeholder -> the names of the units' own parameters, in order.
    buffers: placeholder -> the placeholders of the units' own buffers.
    carried: value -> the value of the same unit that is handed on to the next one.
    last: value of the first unit -> its name in the last one; of what is handed on.
    each: value of the first unit -> its names in all units; of what is read elsewhere.
    """

    first: int
    length: int
    unit: tuple[GraphSegment, ...]
    count: int
    parameters: dict[str, tuple[str, ...]]
    buffers: dict[str, tuple[str, ...]]
    carried: dict[str, str]
    last: dict[str, str]
    each: dict[str, tuple[str, ...]]

    @property
    def num_operations(self) -> int:
        """The operations of one unit."""
        return sum(len(segment.operations) for segment in self.unit)


def stack_name(names: Sequence[str]) -> str:
    """Return a name for the stack of equal parameters.

    >>> stack_name(["layers.0.weight", "layers.1.weight", "layers.2.weight"])
    'layers.0-2.weight'
    """
    first, last = names[0].split("."), names[-1].split(".")
    if len(first) != len(last):
        return f"{names[0]}-{names[-1]}"
    return ".".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def repeats_of(program: ModuleProgram, segments: Sequence[GraphSegment]) -> tuple[Repeat, ...]:
    """Return the loops of a program in order; none overlaps another."""
    finder = _Finder(program, segments)
    found: list[Repeat] = []
    place = 0
    while place < len(segments):
        longest = finder.longest_at(place) if segments[place].block else None
        if longest is not None:
            found.append(longest)
        place += 1 if longest is None else longest.length
    return tuple(found)


class _Finder:
    """Looks for loops in the segments of a program."""

    def __init__(self, program: ModuleProgram, segments: Sequence[GraphSegment]) -> None:
        self.program, self.segments = program, segments
        self.specs: dict[str, ArraySpec | None] = {}
        for placeholder, (kind, name) in program.sources.items():
            self.specs[placeholder] = getattr(program, kind)[name]
        for operation in program.operations:
            self.specs[operation.result] = None if operation.is_tuple else operation.arrays[0]
        self.shapes = [tuple(_shape_of(each) for each in segment.operations) for segment in segments]
        self.readers = Counter(  # of each parameter, by its path: a tied one has several placeholders
            program.sources[name][1]
            for segment in segments
            for name in set(segment.reads)
            if program.sources.get(name, ("", ""))[0] == "parameters"
        )
        self.learned = _learned(program)
        self.wanted = {program.result, *program.updates.values()}

    def longest_at(self, place: int) -> Repeat | None:
        """Return the loop over the most segments that begins at a place; of equal ones the shortest unit."""
        best: Repeat | None = None
        for size in range(1, LONGEST_UNIT + 1):
            found = self._at(place, size)
            if found is not None and (best is None or found.length > best.length):
                best = found
        return best

    def _at(self, place: int, size: int) -> Repeat | None:
        count = 1
        while self._alike(place, place + count * size, size):
            count += 1
        maps: list[Names] = []
        for number in range(count if count > 1 else 0):
            names = self._names(place, place + number * size, size)
            if names is None:
                break
            maps.append(names)
        while len(maps) > 1:
            if found := self._loop(place, size, maps):
                return found
            maps.pop()
        return None

    def _alike(self, one: int, other: int, size: int) -> bool:
        """Return whether units have operations of the same kinds and shapes."""
        if other + size > len(self.segments):
            return False
        return all(
            self.segments[one + n].recomputes == self.segments[other + n].recomputes
            and bool(self.segments[one + n].block) == bool(self.segments[other + n].block)
            and self.shapes[one + n] == self.shapes[other + n]
            for n in range(size)
        )

    def _names(self, one: int, other: int, size: int) -> Names | None:
        """Return the name in another unit of each value of a unit; None if they do not do the same."""
        names: Names = {}
        for mine, theirs in zip(
            self.segments[one : one + size], self.segments[other : other + size], strict=True
        ):
            for a, b in zip(mine.operations, theirs.operations, strict=True):
                if not _same((a.args, a.kwargs), (b.args, b.kwargs), names):
                    return None
                names[a.result] = b.result
        return names

    def _loop(self, place: int, size: int, maps: Sequence[Names]) -> Repeat | None:
        """Return the loop over units, or None if a value from outside is of no kind that a loop can have."""
        unit = self.segments[place : place + size]
        made = {each.result: each for segment in unit for each in segment.operations}
        outside = dict.fromkeys(name for segment in unit for name in segment.reads if name not in made)
        parameters: dict[str, tuple[str, ...]] = {}
        buffers: dict[str, tuple[str, ...]] = {}
        carried: dict[str, str] = {}
        for name in outside:
            names = [each[name] for each in maps]
            if self._are_one(names):
                continue
            kinds = {self.program.sources.get(each, ("", ""))[0] for each in names}
            if kinds == {"parameters"} and self._are_alike_parameters(names):
                parameters[name] = tuple(self.program.sources[each][1] for each in names)
            elif kinds == {"buffers"} and len({self.specs[each] for each in names}) == 1:
                buffers[name] = tuple(names)
            elif source := self._handed_on(names, maps, made):
                carried[name] = source
            else:
                return None
        stacked = [path for paths in parameters.values() for path in paths]
        if not stacked or len(set(stacked)) < len(stacked):
            return None
        length = size * len(maps)
        each, last = self._read_elsewhere(place, length, made, maps, set(carried.values()))
        kept = {*carried.values(), *each}
        later = [{*kept, *(x for after in unit[n + 1 :] for x in after.reads)} for n in range(size)]
        return Repeat(
            first=place,
            length=length,
            unit=tuple(
                dataclasses.replace(s, writes=tuple(x.result for x in s.operations if x.result in wanted))
                for s, wanted in zip(unit, later, strict=True)
            ),
            count=len(maps),
            parameters=parameters,
            buffers=buffers,
            carried=carried,
            last=last,
            each=each,
        )

    def _are_one(self, names: Sequence[str]) -> bool:
        """Return whether a value is the same in all units: the same one, or equal constants."""
        if len(set(names)) == 1:
            return True
        constants = self.program.constants
        if not all(name in constants for name in names):
            return False
        return all(_equal(constants[names[0]], constants[name]) for name in names)

    def _are_alike_parameters(self, names: Sequence[str]) -> bool:
        """Return whether parameters can be stacked: alike, and each read by its own unit alone."""
        paths = [self.program.sources[name][1] for name in names]
        facts = {
            (self.program.parameters[path], self.program.stored[path], path in self.program.frozen)
            for path in paths
        }
        return (
            len(facts) == 1
            and len(set(paths)) == len(paths)
            and all(self.readers[path] == 1 for path in paths)
        )

    def _handed_on(self, names: Sequence[str], maps: Sequence[Names], made: Mapping[str, Operation]) -> str:
        """Return the value of the first unit that the second one reads as `names[1]`, if all do so; or ""."""
        source = next((own for own in made if maps[0][own] == names[1]), "")
        if not source or self.specs[source] is None:
            return ""
        goes_on = all(maps[n - 1][source] == names[n] for n in range(1, len(names)))
        # The first unit of a loop would make a gradient of what needs none, as all others do.
        alike = (names[0] in self.learned) == (source in self.learned)
        return source if goes_on and alike and self.specs.get(names[0]) == self.specs[source] else ""

    def _read_elsewhere(
        self, place: int, length: int, made: Mapping[str, Operation], maps: Sequence[Names], carried: set[str]
    ) -> tuple[dict[str, tuple[str, ...]], Names]:
        """Return what is read after the loop: values of each unit, and values handed on by the last one."""
        after = self.wanted | {name for s in self.segments[place + length :] for name in s.reads}
        each: dict[str, tuple[str, ...]] = {}
        last = {name: maps[-1][name] for name in carried}
        for name in made:
            names = tuple(names[name] for names in maps)
            read = [n for n, its in enumerate(names) if its in after]
            if read and not (name in carried and read == [len(names) - 1]):
                each[name] = names
        return each, last


def _learned(program: ModuleProgram) -> frozenset[str]:
    """Return the values that depend on a trained parameter."""
    frozen = {("parameters", name) for name in program.frozen}
    found = {name for name, source in program.sources.items() if source[0] == "parameters"}
    found = {name for name in found if program.sources[name] not in frozen}
    for operation in program.operations:
        if not found.isdisjoint(reads_of(operation)):
            found.add(operation.result)
    return frozenset(found)


def _shape_of(operation: Operation) -> tuple[Any, ...]:
    """Return what operations of equal units have in common but for the values that they read."""
    path = re.sub(r"\d+", "", operation.path)
    return operation.name, operation.overload, operation.arrays, operation.is_tuple, path


def _same(mine: Any, theirs: Any, names: Names) -> bool:
    """Return whether two units' arguments are the same, with `names` for values; adds those of new ones."""
    if isinstance(mine, GraphValue):
        return isinstance(theirs, GraphValue) and names.setdefault(mine.name, theirs.name) == theirs.name
    if isinstance(mine, list | tuple):
        if not isinstance(theirs, list | tuple) or len(mine) != len(theirs):
            return False
        return all(_same(a, b, names) for a, b in zip(mine, theirs, strict=True))
    if isinstance(mine, dict):
        if not isinstance(theirs, dict) or mine.keys() != theirs.keys():
            return False
        return all(_same(mine[key], theirs[key], names) for key in mine)
    return type(mine) is type(theirs) and bool(mine == theirs)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(np.array_equal(one, other))
