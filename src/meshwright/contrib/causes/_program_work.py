"""Find what a traced program does and the weighed one does not: repeated work, wider products, messages.

Both programs are XLA's. Their fusions differ wherever their sources differ a little, so they are compared by
what is inside: products by their FLOPs, messages and moved arrays by their bytes' kind and elements,
elementwise work by opcode and elements. What the traced program has more of belongs first to what is marked
as computed again, then to lines of the source that have more of it. An instruction's seconds are then blamed
by the share of its work that is too much.

Not compared: the order of the schedule, layouts, and the sizes of fusions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.hlo import FREE, Computation, Execution, Executions, Instruction, Program, ProgramPhases
from meshwright.ledger import calls_the_host, elementwise_of, executions_of, work_of

from ._xplane_programs import BITS, CONTAINERS

RECOMPUTED, MESSAGE, CALLBACK, EXTRA, WIDE = (
    "recomputation",
    "extra message",
    "callback",
    "extra work",
    "wide product",
)
TRANSCENDENTAL = 8.0  # times as much work as a sum, for an element: shares of one fusion, never seconds
SMALLEST = 1.001  # times as much work as the weighed program has, or it is rounding
MOVES = frozenset(
    ("copy", "transpose", "gather", "scatter", "sort", "concatenate", "pad", "custom-call", "topk")
)

Key = tuple[str, ...]  # what kind of work
Place = tuple[bool, str]  # whether it is computed again, and the line of the source


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    key: Key
    place: Place
    quantity: float
    weight: float
    format_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """Hold the share of an instruction's seconds that the weighed program lacks, and the kind of that work.

    `what`: RECOMPUTED, MESSAGE, CALLBACK, EXTRA or WIDE. `words`: "fp64 where the weighed program has fp32".
    """

    what: str
    share: float
    source: str
    words: str = ""


@dataclass(slots=True, kw_only=True)
class ProgramDifference:
    """Hold the differences between a traced program and the weighed one.

    `surplus`: by the instruction's name in the traced program. `matched`: the share of the traced program's
    work that the weighed one has too. `lacking`: what only the weighed program has, in words.
    """

    surplus: dict[str, list[Surplus]] = field(default_factory=dict[str, list[Surplus]])
    matched: float = 1.0
    lacking: tuple[str, ...] = ()


class _Work:
    """The work of one program: leaves of each scheduled instruction, and their sums."""

    def __init__(self, program: Program) -> None:
        self.units: dict[str, list[_Leaf]] = {}
        self.sums: defaultdict[Key, dict[Place, float]] = defaultdict(dict)
        self.formats: defaultdict[Key, dict[str, float]] = defaultdict(dict)
        self.lines: set[str] = set()
        self._phases = ProgramPhases(program)
        executions = executions_of(program)
        for run in executions:
            if run.caller is None and run.instruction.opcode not in (*FREE, *CONTAINERS):
                self._add(executions, run)

    def _add(self, executions: Executions, run: Execution) -> None:
        leaves = list(self._leaves(executions.program, run.computation, run.instruction, run.times))
        if any(leaf.key[0] != "move" for leaf in leaves):
            leaves = [leaf for leaf in leaves if leaf.key[0] != "move"]
        if not leaves:
            return
        self.units[run.instruction.name] = leaves
        for leaf in leaves:
            sums = self.sums[leaf.key]
            sums[leaf.place] = sums.get(leaf.place, 0.0) + leaf.quantity
            self.lines.add(leaf.place[1])
            if leaf.format_name:
                formats = self.formats[leaf.key]
                formats[leaf.format_name] = formats.get(leaf.format_name, 0.0) + leaf.quantity

    def _leaves(self, program: Program, home: Computation, one: Instruction, times: int) -> Iterator[_Leaf]:
        """Yield the work of an instruction and of all that is fused into it."""
        again = self._phases.of(home, one) == "recompute"
        place = again, program.source_line(one)
        if (work := work_of(home, one)) is not None:
            flops = float(work.flops)
            key = ("product", work.kind, f"{work.flops}")
            yield _Leaf(key=key, place=place, quantity=flops * times, weight=flops, format_name=work.format)
            return
        elements = float(sum(array.num_elements for array in one.arrays))
        if one.collective:
            if not one.opcode.endswith("-done"):
                key = ("message", one.collective)
                yield _Leaf(key=key, place=place, quantity=elements * times, weight=elements)
            return
        if calls_the_host(one):
            yield _Leaf(key=("callback",), place=place, quantity=float(times), weight=1e12)
            return
        if (counted := elementwise_of(program, home, one)) is not None:
            name, number = counted
            weight = number * (TRANSCENDENTAL if name == "transcendental" else 1.0)
            yield _Leaf(
                key=("elementwise", one.opcode), place=place, quantity=float(number * times), weight=weight
            )
        elif one.opcode in MOVES and not one.all_called:
            yield _Leaf(key=("move", one.opcode), place=place, quantity=elements * times, weight=elements)
        elif one.opcode in ("sort", "topk", "scatter", "custom-call"):
            yield _Leaf(
                key=("special", one.opcode), place=place, quantity=elements * times, weight=100 * elements
            )
        if one.opcode in ("fusion", "call", "async-start"):
            for inner_home, inner in program.inside(one):
                yield from self._leaves(program, inner_home, inner, times)


def difference_of(
    traced: Program, weighed: Program, ratios: Mapping[str, float] | None = None
) -> ProgramDifference:
    """Return how the traced program differs from the weighed one.

    Args:
        ratios: by number format, how many times as long a product takes as in the narrowest of them.
    """
    mine, theirs = _Work(traced), _Work(weighed)
    found = ProgramDifference(matched=_matched(mine, theirs), lacking=tuple(_lacking(mine, theirs)))
    excess = {key: _excess(mine.sums[key], theirs.sums.get(key, {})) for key in mine.sums}
    _capped(excess, mine, theirs)
    for name, leaves in mine.units.items():
        whole = sum(leaf.weight for leaf in leaves)
        shares: defaultdict[tuple[str, str], float] = defaultdict(float)
        for leaf in leaves:
            part = excess[leaf.key].get(leaf.place, 0.0)
            if part and whole:
                shares[_what(leaf), leaf.place[1]] += leaf.weight / whole * part
        found.surplus[name] = [
            Surplus(what=what, share=min(share, 1.0), source=source)
            for (what, source), share in shares.items()
        ]
        if not shares and (wide := _wider(leaves, mine, theirs, ratios or {})) is not None:
            found.surplus[name].append(wide)
    return found


def _what(leaf: _Leaf) -> str:
    if leaf.key[0] == "message":
        return MESSAGE
    if leaf.key[0] == "callback":
        return CALLBACK
    return RECOMPUTED if leaf.place[0] else EXTRA


def _excess(mine: Mapping[Place, float], theirs: Mapping[Place, float]) -> dict[Place, float]:
    """Return by place what share of one kind of work the other program does not have."""
    total, other = sum(mine.values()), sum(theirs.values())
    if total <= SMALLEST * other:
        return {}
    left = total - other
    more = {place: max(0.0, amount - theirs.get(place, 0.0)) for place, amount in mine.items()}
    found: dict[Place, float] = {}
    for again in (True, False):
        here = {place: amount for place, amount in more.items() if place[0] is again and amount > 0}
        taken = min(left, sum(here.values()))
        for place, amount in here.items():
            found[place] = taken * amount / sum(here.values()) / mine[place]
        left -= taken
    return found


def _capped(excess: dict[Key, dict[Place, float]], mine: _Work, theirs: _Work) -> None:
    """Reduce what is too much of products to what is too much of all of them.

    XLA may join products that share an operand, or swap one for another; then none is new.
    """

    def products(work: _Work) -> float:
        return sum(sum(places.values()) for key, places in work.sums.items() if key[0] == "product")

    keys = [key for key in excess if key[0] == "product"]
    blamed = sum(share * mine.sums[key][place] for key in keys for place, share in excess[key].items())
    most = max(0.0, products(mine) - products(theirs))
    scale = min(1.0, most / blamed) if blamed else 1.0
    for key in keys:
        excess[key] = {place: share * scale for place, share in excess[key].items() if share * scale > 1e-3}


def _wider(leaves: list[_Leaf], mine: _Work, theirs: _Work, ratios: Mapping[str, float]) -> Surplus | None:
    """Return the surplus of a product in a wider format than the weighed program has for it."""
    product = max((leaf for leaf in leaves if leaf.format_name), key=lambda leaf: leaf.weight, default=None)
    if product is None:
        return None
    intended = theirs.formats.get(product.key)
    if not intended or product.format_name in intended:
        return None
    narrow = max(intended, key=lambda name: intended[name])
    bits, fewer = BITS.get(product.format_name, 0), BITS.get(narrow, 0)
    if not bits or not fewer or bits <= fewer:
        return None
    ratio = ratios.get(product.format_name, 0.0) / ratios[narrow] if ratios.get(narrow) else 0.0
    share = 1 - 1 / ratio if ratio > 1 else (0.0 if ratio else 1 - fewer / bits)
    words = f"{product.format_name} where the weighed program has {narrow}"
    return Surplus(what=WIDE, share=share, source=product.place[1], words=words)


def _matched(mine: _Work, theirs: _Work) -> float:
    """Return what share of the traced program's products, or else of its lines, the weighed one has too."""
    products = {key: sum(places.values()) for key, places in mine.sums.items() if key[0] == "product"}
    total = sum(products.values())
    same = sum(
        min(amount, sum(theirs.sums[key].values())) for key, amount in products.items() if key in theirs.sums
    )
    lines = len(mine.lines & theirs.lines - {""}) / max(1, len(mine.lines - {""}))
    return max(same / total if total else 0.0, lines)


def _lacking(mine: _Work, theirs: _Work) -> Iterator[str]:
    for key, places in theirs.sums.items():
        amount, here = sum(places.values()), sum(mine.sums[key].values()) if key in mine.sums else 0.0
        if key[0] == "message" and amount > SMALLEST * here:
            yield f"{key[1]} of {amount - here:.3g} elements"
