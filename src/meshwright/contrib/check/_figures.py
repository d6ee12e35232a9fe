"""Read the figures of a weighing from what `weigh --json` prints, whoever printed it.

A saved file, another process, another commit or another version of Meshwright may have made it: only the
fields that are compared are read, and each is checked. A field that an older version lacks is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from meshwright.errors import InputError

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter

IDLE = "idle in its allocations"
"""The reserved bytes in which no value lives at the peak."""
ROUNDING = 1e-9  # of a sum of seconds
FINITE: ConfigDict = {"allow_inf_nan": False}


@dataclass(frozen=True, slots=True)
class _Timeline:
    instants: list[int]
    by_category: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class _Buffer:
    num_bytes: int = 0
    source_line: Any = None
    category: Any = None
    module: Any = None
    operation: Any = ""


@dataclass(frozen=True, slots=True)
class _Memory:
    reserved_bytes: int
    by_category: dict[str, int]
    allowance: dict[str, int] = field(default_factory=dict[str, int])
    usable_bytes: int | None = None
    timeline: _Timeline | None = None
    buffers: list[_Buffer] = field(default_factory=list[_Buffer])


@dataclass(frozen=True, slots=True)
class _Flops:
    model: int
    executed: int
    recomputed: int
    by_format: dict[str, int]
    by_module: dict[str, int]
    by_line: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


@dataclass(frozen=True, slots=True)
class _Message:
    kind: str
    axes: tuple[str, ...]
    count: int
    wire_bytes: int
    link: str = ""
    by_line: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class _Ledger:
    memory: _Memory
    flops: _Flops
    traffic: list[_Message]


@dataclass(frozen=True, slots=True)
class _Slice:
    __pydantic_config__ = FINITE
    kind: str
    name: str
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class _Seconds:
    __pydantic_config__ = FINITE
    low: float | None
    expected: float
    high: float | None = None


@dataclass(frozen=True, slots=True)
class _Prediction:
    step_seconds: _Seconds
    slices: list[_Slice]


@dataclass(frozen=True, slots=True)
class _Record:
    config: str
    layout: str
    fleet: dict[str, Any]
    fits: bool | None = None
    ledger: _Ledger | None = None
    prediction: _Prediction | None = None
    refusal: dict[str, Any] | None = None
    run_config: dict[str, Any] | None = None
    compile: dict[str, Any] = field(default_factory=dict[str, Any])


Place = tuple[str, str, str]
"""Where something is: the source line ("model.py:25"), what it is (a category, a format), and the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one weighing that can be compared with another's.

    `memory`: bytes of a device by category; the allowance's items too. `by_place`: its reserved bytes by
    place. `flops` of the step on all devices by module; `flops_by_place` by place, empty where unknown.
    `traffic`: the wire bytes of a device and step by kind, axes and link; `messages`: how many;
    `traffic_by_place`: its bytes by place.
    `seconds`: what a step takes that nothing hides, by class; empty where no time is predicted.
    `settings`: whatever may be the cause, by its name. `curve`: the bytes that live on a device through the
    step: shares of its schedule, each with the bytes.
    """

    label: str
    name: str
    fits: bool | None
    refused: str
    memory: dict[str, int]
    by_place: dict[Place, int]
    flops: dict[str, int]
    flops_by_format: dict[str, int]
    flops_by_place: dict[Place, int]
    recomputed: int
    traffic: dict[str, int]
    messages: dict[str, int]
    wire_bytes_by_axis: dict[str, int]
    traffic_by_place: dict[Place, int]
    seconds: dict[str, float]
    step_seconds: float | None
    settings: dict[str, str]
    curve: tuple[tuple[float, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that a device needs: reserved, and the allowance."""
        return sum(self.memory.values())

    @property
    def num_flops(self) -> int:
        """Executed FLOPs of the step."""
        return sum(self.flops.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return sum(self.traffic.values())


def figures_of(tree: Any, label: str) -> Figures:
    """Return the figures of a weighing in JSON's types.

    Args:
        label: what to call it.

    Raises:
        InputError: it is not what `weigh --json` prints.
    """
    from pydantic import ValidationError

    if isinstance(tree, dict) and isinstance(inner := cast("dict[str, Any]", tree).get("weighings"), list):
        several = cast("list[Any]", inner)
        if len(several) != 1:
            raise InputError(f"{label}: it holds {len(several)} weighings", hint="weigh without --all")
        tree = several[0]
    try:
        record = _reader().validate_python(tree)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole text"
        hint = "give a file that `meshwright weigh ... --json` wrote, or a run's folder"
        raise InputError(f"{label}: this is not a weighing: {where}: {first['msg']}", hint=hint) from invalid
    return _figures(record, label)


@cache
def _reader() -> TypeAdapter[_Record]:
    from pydantic import TypeAdapter

    return TypeAdapter(_Record)


def _figures(record: _Record, label: str) -> Figures:
    ledger = record.ledger
    memory, traffic = _memory(ledger), _traffic(ledger)
    return Figures(
        label=label,
        name=record.config,
        fits=record.fits,
        refused="" if record.refusal is None else str(record.refusal.get("words", ""))[:500],
        memory=memory[0],
        by_place=memory[1],
        flops={} if ledger is None else _closed(ledger.flops.by_module, ledger.flops.executed),
        flops_by_format={} if ledger is None else ledger.flops.by_format,
        flops_by_place={
            (line, format_name, ""): count
            for line, formats in ({} if ledger is None else ledger.flops.by_line).items()
            for format_name, count in formats.items()
        },
        recomputed=0 if ledger is None else ledger.flops.recomputed,
        traffic=traffic["bytes"],
        messages=traffic["count"],
        wire_bytes_by_axis=traffic["axis"],
        traffic_by_place=traffic["place"],
        seconds=_seconds(record.prediction),
        step_seconds=None if record.prediction is None else record.prediction.step_seconds.expected,
        settings=_settings(record),
        curve=() if ledger is None else _curve(ledger.memory.timeline),
    )


def _memory(ledger: _Ledger | None) -> tuple[dict[str, int], dict[Place, int]]:
    """Return the bytes of a device by category, with the allowance's; and its reserved bytes by place."""
    if ledger is None:
        return {}, {}
    by_category = Counter(ledger.memory.by_category)
    by_category.update({f"allowance: {name}": size for name, size in ledger.memory.allowance.items()})
    by_place: Counter[Place] = Counter()
    for buffer in ledger.memory.buffers:
        by_place[_place_of(buffer)] += buffer.num_bytes
    if by_place and (idle := ledger.memory.reserved_bytes - by_place.total()):
        by_place["", IDLE, ""] += idle
    return dict(by_category), dict(by_place)


def _curve(timeline: _Timeline | None) -> tuple[tuple[float, int], ...]:
    """Return the bytes that live at each instant, by its share of the schedule; nothing if unknown."""
    if timeline is None or len(timeline.instants) < 2 or timeline.instants[-1] <= 0:
        return ()
    columns = zip(*timeline.by_category.values(), strict=False)
    last = timeline.instants[-1]
    return tuple((at / last, sum(sizes)) for at, sizes in zip(timeline.instants, columns, strict=False))


def _traffic(ledger: _Ledger | None) -> dict[str, dict[Any, int]]:
    """Return what a device sends: bytes and messages by kind, axes and link; bytes by axis, and by place."""
    sums: dict[str, Counter[Any]] = {name: Counter() for name in ("bytes", "count", "axis", "place")}
    for message in () if ledger is None else ledger.traffic:
        axes = "+".join(message.axes)
        name = f"{message.kind} over {axes}{f', {message.link}' if message.link else ''}"
        sums["bytes"][name] += message.wire_bytes
        sums["count"][name] += message.count
        sums["axis"][axes] += message.wire_bytes
        for line, wire_bytes in message.by_line.items():
            sums["place"][line, name, ""] += wire_bytes
    return {name: dict(counted) for name, counted in sums.items()}


def _seconds(predicted: _Prediction | None) -> dict[str, float]:
    """Return the seconds of a step that nothing hides, by class; they sum to the step's."""
    seconds: dict[str, float] = {}
    for part in () if predicted is None else predicted.slices:
        seconds[part.name] = seconds.get(part.name, 0.0) + part.exposed_seconds
    if predicted is not None and seconds:
        rest = predicted.step_seconds.expected - sum(seconds.values())
        if abs(rest) > ROUNDING * predicted.step_seconds.expected:
            seconds["what no class holds"] = rest
    return seconds


def _closed(parts: Mapping[str, int], whole: int) -> dict[str, int]:
    """Return parts whose sum is the whole: what they lack is outside of any module."""
    closed = Counter(parts)
    if rest := whole - closed.total():
        closed[""] += rest
    return dict(closed)


def _place_of(buffer: _Buffer) -> Place:
    texts = (buffer.source_line, buffer.category, buffer.module)
    line, category, module = (text if isinstance(text, str) else "" for text in texts)
    return line, category, module or str(buffer.operation)[:200]


def _settings(record: _Record) -> dict[str, str]:
    """Return by name what may differ between two weighings and be the cause."""
    found: dict[str, str] = {"program": record.config, "layout": record.layout}
    found["fleet"] = str(record.fleet.get("name", ""))
    _flatten("", record.run_config or {}, found)
    made = record.compile
    found["compiler"] = str(made.get("compiler", ""))
    _flatten("option", made.get("options") or {}, found)
    return found


MOST_DEPTH = 8


def _flatten(prefix: str, tree: Any, found: dict[str, str], depth: int = 0) -> None:
    if isinstance(tree, dict) and depth < MOST_DEPTH:
        for key, value in cast("dict[str, Any]", tree).items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), value, found, depth + 1)
    elif prefix not in ("name", "layout"):
        found[prefix] = str(tree)[:200]
