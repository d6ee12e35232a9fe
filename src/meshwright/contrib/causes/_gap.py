"""Set a recorded step next to the prediction of a weighing, and name the causes of the difference.

`gap_of` takes any record, of whichever profiler. Each second of the mean step belongs to one item of the
timeline, and each item to one cause, or to none. What has none is compared with the prediction by class, and
only what lies above the prediction's interval is blamed on a rate; on a CPU, whose rates are those of an hour
on a machine that others use too, nothing is. The rest is unexplained, and said to be.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.eager import EagerAccount
from meshwright.errors import InputError
from meshwright.ledger import executions_in
from meshwright.measure import calibration_for
from meshwright.predict import Speedup, class_of, machine_of
from meshwright.results import Weighing
from meshwright.units import format_seconds

from ._cause import KINDS, Asked, Cause, ClassRow, Gap, step_row
from ._cures import with_saving
from ._eager_work import EagerDifference
from ._measured_busy import busy_of
from ._modules import module_rows
from ._program_work import ProgramDifference, Surplus, difference_of
from ._recorded import COPY_KINDS, MESSAGE_KINDS, UNKNOWN, Recorded, Work, stem
from ._step_parts import IDLE, INSIDE, NOTHING, OTHERS, Item, Timeline, item_of, timeline_of
from ._xplane_programs import BITS, parsed

MOST_PARTS = 4  # of a prediction, that could take longer
LEAST_SHARE = 0.01  # of the step: smaller causes are unexplained
LEAST_MATCHED = 0.3  # of the traced program, or it is another one
MOSTLY = 0.8  # of a cause's seconds, that lie in a third of the steps at most: those differ
SLOW_DEVICE = 0.05  # of the step, by which a device is slower than the median of the others
SAME_DEVICE = 0.8  # of the steps in which it is the slowest
MANY_TIMES = 10.0  # the prediction; from there on both times are said, and blamed without an interval
MANY_KERNELS = 100  # in a step; with fewer, gaps on a CPU come from other processes
MOST_GAPS = 0.5  # of the time of kernels: on a CPU, larger gaps are blamed
IDLE_KINDS = {
    "compile": "compilation",
    "trace": "compilation",
    "collect": "collect",
    "data": "input",
    "save": "save",
    "transfer": "copy",
    "callback": "callback",
    "python": "host",
    "launch": "small programs",
}
"""The kind of a cause by what the host does while the devices are idle."""
DIFFERING = ("host", "save", "copy", "small programs")
"""Causes that are those of some steps alone, if most of their seconds are."""


@dataclass(slots=True)
class _Amount:
    """The seconds of one cause by step, and by name, as parts of the mean step."""

    by_step: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    names: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        """Seconds of the mean step."""
        return sum(self.by_step.values())

    def add(self, more: _Amount) -> None:
        """Add the seconds of another cause."""
        for index, seconds in more.by_step.items():
            self.by_step[index] += seconds
        for name, seconds in more.names.items():
            self.names[name] += seconds

    def of_some_steps(self, num_steps: int) -> list[int]:
        """Return the few steps that have nearly all of the seconds; none if there are no such steps."""
        ranked = sorted(self.by_step, key=lambda index: -self.by_step[index])
        few = [
            index for index in ranked[: num_steps // 3] if self.by_step[index] > self.by_step[ranked[0]] / 2
        ]
        return sorted(few) if sum(self.by_step[index] for index in few) > MOSTLY * self.seconds else []


_Key = tuple[str, str]  # the kind, and the line of the source


def gap_of(recorded: Recorded, weighing: Weighing) -> Gap:
    """Return why the recorded step takes longer than the weighing predicts.

    Raises:
        InputError: the trace is of another program, or of more devices than the fleet has.
    """
    _check_devices(recorded, weighing)
    found = _Attribution(recorded, weighing)
    return found.gap()


def gap_of_seconds(seconds: float, weighing: Weighing, how: str) -> Gap:
    """Return the gap of a step of which only the time is known: no cause is named, for nothing tells one.

    `could_be` says what the prediction has that could take longer, the largest first; nothing of a step that
    is no slower than predicted.

    Raises:
        InputError: no time is predicted.
    """
    prediction = weighing.prediction
    if prediction is None:
        raise InputError(
            f"no time is predicted for {weighing.name}: {weighing.no_prediction}",
            hint="give a trace, whose own gaps and waits say something without a prediction: --trace FOLDER",
        )
    parts = [each for each in prediction.slices if each.exposed_seconds > 0]
    parts.sort(key=lambda each: -each.exposed_seconds)
    could = [f"{each.name}: predicted {format_seconds(each.exposed_seconds)}" for each in parts[:MOST_PARTS]]
    could += [
        f"{each.what} would save {format_seconds(each.saving_seconds)}" for each in prediction.what_helps[:2]
    ]
    return Gap(
        same_program=None,
        rows=step_row(prediction.step_seconds, seconds, how),
        not_compared={"causes": "a step's time alone tells none: give a trace"},
        program=weighing.name,
        fleet=weighing.fleet.name,
        measured_seconds=seconds,
        predicted=prediction.step_seconds,
        causes=(),
        unexplained_seconds=seconds - prediction.step_seconds.expected,
        num_devices=weighing.fleet.num_devices,
        could_be=tuple(could) if seconds > prediction.step_seconds.expected else (),
        notes=prediction.interval_reasons,
        asked=Asked(weighing=weighing),
    )


def _check_devices(recorded: Recorded, weighing: Weighing) -> None:
    number, fleet = len(recorded.devices), weighing.fleet
    if number > fleet.num_devices:
        raise InputError(
            f"the trace has {number} devices, and {fleet.name} has {fleet.num_devices}",
            hint=f"name the fleet that was traced: --on {number}x{fleet.chip.name}",
        )


class _Attribution:
    """Give each second of the mean step to a cause, to a class, or to the rest."""

    def __init__(self, recorded: Recorded, weighing: Weighing) -> None:
        self.recorded, self.weighing = recorded, weighing
        self.line: Timeline = timeline_of(recorded)
        self.steps = self.line.step_seconds
        self.measured = statistics.fmean(self.steps)
        self.is_cpu = weighing.fleet.chip.platform == "cpu"
        self.amounts: defaultdict[_Key, _Amount] = defaultdict(_Amount)
        self.rest: defaultdict[str, float] = defaultdict(float)  # by class, exposed
        self.rest_lines: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.only_message = self._only_message()
        self.differences = self._differences()
        self.eager = self._eager()

    def gap(self) -> Gap:
        facts = _facts_by_item(self.recorded)
        for index, part in enumerate(self.line.parts):
            for item, seconds in part.items():
                self._give(index, item, seconds / len(self.steps), facts)
        causes = [*self._named(), *self._of_classes(), *self._straggler()]
        least = LEAST_SHARE * self.measured
        kept = sorted((each for each in causes if each.seconds > least), key=lambda each: -each.seconds)
        prediction = self.weighing.prediction
        expected = 0.0 if prediction is None else prediction.step_seconds.expected
        gap = self.measured - expected
        found = [each.matched for each in self.differences.values()]
        if self.eager is not None and self.eager.matched is not None:
            found.append(self.eager.matched)
        differs = self.eager is not None or any(
            each.surplus[name] for each in self.differences.values() for name in each.surplus
        )
        how = f"mean of {len(self.steps)} steps of a trace of {self.recorded.profiler}.profiler"
        return Gap(
            same_program=None if not found else not differs,
            rows=step_row(None if prediction is None else prediction.step_seconds, self.measured, how),
            not_compared={"FLOPs and bytes": "a trace does not count them"},
            program=self.weighing.name,
            fleet=self.weighing.fleet.name,
            measured_seconds=self.measured,
            predicted=None if prediction is None else prediction.step_seconds,
            causes=tuple(with_saving(each, self.weighing) for each in kept),
            unexplained_seconds=gap - sum(each.seconds for each in kept),
            step_seconds=tuple(self.steps),
            num_devices=len(self.recorded.devices),
            classes=self._classes(),
            modules=module_rows(self.recorded, self.weighing, self.line.exposed),
            busy=busy_of(self.recorded, self.steps),
            matched=min(found, default=None if self.eager is None else self.eager.matched),
            files=self.recorded.files,
            notes=tuple(self._notes()),
            asked=Asked(weighing=self.weighing),
        )

    def _only_message(self) -> str:
        """Return the kind of the predicted messages, if there is one: messages of no known kind are of it."""
        kinds = {name for name in self._predicted()[0] if name in MESSAGE_KINDS}
        return kinds.pop() if len(kinds) == 1 else ""

    def _differences(self) -> dict[str, ProgramDifference]:
        """Return how each compilation of the traced step differs from the weighed program."""
        if not self.recorded.programs or not self.weighing.is_compiled:
            return {}
        weighed = executions_in(self.weighing.folder, self.weighing.compiled).program
        ratios = _seconds_by_format(self.weighing)
        ran = {work.program for work in self.recorded.work if stem(work.program) == self.line.main}
        found: dict[str, ProgramDifference] = {}
        for name in ran & set(self.recorded.programs):
            if (program := parsed(self.recorded.programs[name])) is not None:
                found[name] = difference_of(program, weighed, ratios)
        if found and max(each.matched for each in found.values()) < LEAST_MATCHED:
            share = 100 * max(each.matched for each in found.values())
            raise InputError(
                f"{share:.0f} % of the traced program {self.line.main} is in {self.weighing.name}: the trace "
                "is of another program",
                hint="name the program, the layout and the fleet of the traced run; or trace its steps",
            )
        return found

    def _eager(self) -> EagerDifference | None:
        """Return how an eager step differs from the weighed one; None for a compiled program."""
        account, ledger = self.weighing.made_by, self.weighing.figures
        if not isinstance(account, EagerAccount) or ledger is None or self.line.main:
            return None
        found = EagerDifference(self.recorded, account, ledger.flops, _seconds_by_format(self.weighing))
        if found.matched is not None and found.matched < LEAST_MATCHED:
            raise InputError(
                f"a traced step has {found.ratio:.3g} times the FLOPs of {self.weighing.name} in matrix "
                "products: the trace is of another program, or of another batch",
                hint="name the program and the inputs of the traced run",
            )
        return found

    def _give(self, index: int, item: Item, seconds: float, facts: Mapping[Item, Work]) -> None:
        """Give the seconds of one item in one step to a cause, or to the rest of its class."""
        if item.kind == IDLE:
            kind = self._kind_of_idle(item)
            if kind is None:
                self.rest[INSIDE if item.host == INSIDE else IDLE] += seconds
            else:
                self._add(kind, item.source or "", seconds, index, item.name)
            return
        if self.line.main and item.program and stem(item.program) != self.line.main:
            self._add("small programs", item.source or "", seconds, index, stem(item.program))
            return
        left = seconds
        for surplus in self._surplus_of(item, facts.get(item)):
            part = seconds * surplus.share
            name = facts[item].kind if surplus.what == "extra message" and item in facts else ""
            self._add(surplus.what, surplus.source or item.source or "", part, index, name, surplus.words)
            left -= part
        if left <= 0:
            return
        if item.kind in COPY_KINDS and item.kind != "copy":
            self._add("copy", item.source or "", left, index, item.kind)
        elif item.kind == "callback" and not self.differences:
            self._add("callback", item.source or "", left, index, item.name)
        else:
            name = self.only_message if item.kind == "message" and self.only_message else item.kind
            self.rest[name] += left
            self.rest_lines[name][item.source or ""] += left

    def _surplus_of(self, item: Item, work: Work | None) -> Sequence[Surplus]:
        if (difference := self.differences.get(item.program)) is not None:
            return difference.surplus.get(item.name, ())
        return () if self.eager is None or work is None else self.eager.surplus_of(work)

    def _kind_of_idle(self, item: Item) -> str | None:
        """Return the kind of cause of a device's idle time; None if nothing of it is to be blamed."""
        if item.host == "wait":
            return None if self.line.main else "synchronization"
        if item.host in (INSIDE, OTHERS):
            return None
        if item.host == NOTHING:
            return None if self.recorded.host else "host"
        if not self.line.main and item.host == "launch":  # PyTorch, whose host launches each kernel
            return "update" if item.name.startswith("Optimizer.") else "gaps"
        if item.host == "launch" and (not item.program or item.program == self.line.main):
            return None  # the step's own launch
        if item.host == "python" and item.source is None:
            return None
        return IDLE_KINDS[item.host]

    def _add(self, kind: str, source: str, seconds: float, index: int, name: str, words: str = "") -> None:
        amount = self.amounts[kind, "" if kind == "gaps" else source]
        amount.by_step[index] += seconds
        if words or name:
            amount.names[words or name] += seconds

    def _named(self) -> list[Cause]:
        """Return the causes of the amounts, where those of some steps alone are one cause for each line."""
        merged: dict[_Key, _Amount] = {}
        for (kind, where), amount in self.amounts.items():
            is_of_some = kind in DIFFERING and amount.of_some_steps(len(self.steps))
            merged.setdefault(("differing steps" if is_of_some else kind, where), _Amount()).add(amount)
        _join_python(merged)
        if ("gaps", "") in merged:
            merged["gaps", ""].by_step[0] -= self._predicted_idle
        if sum(kind == "compilation" for kind, _ in merged) > 1:
            _join(merged, "compilation")
        return [
            Cause(
                kind=kind,
                seconds=amount.seconds,
                name=_names(kind, amount.names),
                where=where,
                evidence=self._evidence(kind, amount),
                cure=KINDS[kind].cure,
            )
            for (kind, where), amount in merged.items()
        ]

    def _evidence(self, kind: str, amount: _Amount) -> str:
        number, whole = len(amount.by_step), len(self.steps)
        words = f"in {number} of {whole} steps" if number < whole else f"in each of {whole} steps"
        if kind == "differing steps":
            which = amount.of_some_steps(whole)
            words = f"in {len(which)} of {whole} steps{_period(which)}"
        if kind == "small programs":
            launches = sum(count for name, count in self._launches.items() if name in amount.names)
            launches = launches or sum(self._launches.values())
            words += f", {launches / whole:.0f} launches a step" if launches else ""
        return words

    @property
    def _launches(self) -> Counter[str]:
        return self.line.launches

    @property
    def _predicted_idle(self) -> float:
        prediction = self.weighing.prediction
        return 0.0 if prediction is None else prediction.seconds_by_kind["idle"]

    def _predicted(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return predicted seconds by class: all of them, and the exposed ones."""
        whole: defaultdict[str, float] = defaultdict(float)
        exposed: defaultdict[str, float] = defaultdict(float)
        prediction = self.weighing.prediction
        for each in () if prediction is None else prediction.slices:
            whole[class_of(each.name)] += each.seconds
            exposed[class_of(each.name)] += each.exposed_seconds
        return dict(whole), dict(exposed)

    def _of_classes(self) -> list[Cause]:
        """Return causes for classes of work that take longer than the prediction's interval allows."""
        prediction = self.weighing.prediction
        busy = sum(seconds for kind, seconds in self.rest.items() if kind not in (INSIDE, IDLE))
        kernels = sum(stem(work.program) == self.line.main for work in self.recorded.work)
        kernels_in_a_step = kernels / len(self.steps) / max(1, len(self.recorded.devices))
        causes: list[Cause] = []
        gaps = self.rest[INSIDE] - self._predicted_idle
        many = kernels_in_a_step >= MANY_KERNELS and self.rest[INSIDE] > MOST_GAPS * busy
        if gaps > 0 and (many if self.is_cpu else prediction is not None):
            words = f"{kernels_in_a_step:.0f} kernels a step"
            causes.append(Cause(kind="gaps", seconds=gaps, evidence=words, cure=KINDS["gaps"].cure))
        if self.is_cpu or prediction is None:
            return causes
        high = prediction.step_seconds.high
        slack = MANY_TIMES if high is None else high / prediction.step_seconds.expected
        whole, exposed = self._predicted()
        lasted = _seconds_by_kind(self.recorded, len(self.steps))
        if self.only_message:
            lasted[self.only_message] += lasted.pop("message", 0.0)
        for name, seconds in self.rest.items():
            if name in (INSIDE, IDLE, UNKNOWN) or name in COPY_KINDS or not whole.get(name):
                continue
            excess = seconds - slack * exposed.get(name, 0.0)
            if excess <= 0:
                continue
            if name in MESSAGE_KINDS:
                kind = "slow message" if lasted[name] > slack * whole[name] else "exposed message"
                evidence = (
                    f"{format_seconds(lasted[name])} of messages, predicted {format_seconds(whole[name])}"
                )
            else:
                kind = "slow work"
                times = seconds / exposed[name]
                often = f"{times:.1f} times the" if times < MANY_TIMES else f"{format_seconds(seconds)},"
                evidence = f"{often} predicted {format_seconds(exposed[name])}"
            line = max(self.rest_lines[name], key=self.rest_lines[name].__getitem__)
            helps = self._speedup(kind)
            causes.append(
                Cause(
                    kind=kind,
                    seconds=excess,
                    name=name,
                    where=line,
                    evidence=evidence,
                    cure=KINDS[kind].cure,
                    change="" if helps is None else helps.change,
                    saving_seconds=None if helps is None else helps.saving_seconds,
                )
            )
        return causes

    def _speedup(self, kind: str) -> Speedup | None:
        """Return what the prediction says of messages: a change that was walked, else the bound."""
        prediction = self.weighing.prediction
        helps = () if prediction is None else prediction.what_helps
        mine = [each for each in helps if each.change or "collectives" in each.what]
        return mine[0] if mine and kind in ("exposed message", "slow message") else None

    def _straggler(self) -> list[Cause]:
        """Return the device for which the others wait, if it is the same one in most steps."""
        devices = list(self.line.by_device)
        if len(devices) < 2 or len(self.steps) < 3:
            return []
        own = {device: [_compute(part) for part in self.line.by_device[device]] for device in devices}
        slowest = max(devices, key=lambda device: sum(own[device]))
        others = [statistics.fmean(own[device]) for device in devices if device != slowest]
        more = statistics.fmean(own[slowest]) - statistics.median(others)
        worst = sum(max(devices, key=lambda d: own[d][i]) == slowest for i in range(len(self.steps)))
        waited = sum(seconds for kind, seconds in self.rest.items() if kind in MESSAGE_KINDS)
        if more < SLOW_DEVICE * self.measured or worst < SAME_DEVICE * len(self.steps):
            return []
        rank, _, device = slowest.partition("/")
        name = f"device {device}" if self.recorded.num_ranks == 1 else f"rank {rank}, device {device}"
        return [
            Cause(
                kind="straggler",
                seconds=min(more * (1 - 1 / len(devices)), waited),
                name=name,
                evidence=f"the slowest in {worst} of {len(self.steps)} steps, its kernels take "
                f"{format_seconds(more)} longer than those of the others",
                cure=KINDS["straggler"].cure,
            )
        ]

    def _classes(self) -> tuple[ClassRow, ...]:
        """Return predicted and measured seconds by class; with idle time they sum to the step."""
        measured: defaultdict[str, float] = defaultdict(float)
        for part in self.line.parts:
            for item, seconds in part.items():
                name = "idle" if item.kind == IDLE else item.kind
                measured[name] += seconds / len(self.steps)
        _, exposed = self._predicted()
        exposed["idle"] = exposed.pop("launch", 0.0)
        known = self.weighing.prediction is not None
        names = sorted({*measured, *(name for name, seconds in exposed.items() if seconds > 0)},
                       key=lambda name: -max(measured[name], exposed.get(name, 0.0)))  # fmt: skip
        return tuple(
            ClassRow(name=name, predicted=exposed.get(name, 0.0) if known else None, measured=measured[name])
            for name in names
        )

    def _notes(self) -> Iterable[str]:
        yield from self.recorded.notes
        for why, number in self.recorded.unread.items():
            yield f"left out: {number} {why}"
        unknown = self.rest[UNKNOWN]
        if unknown > LEAST_SHARE * self.measured:
            yield f"{format_seconds(unknown)} of kernels whose names tell no class"
        lacking = {words for each in self.differences.values() for words in each.lacking}
        for words in sorted(lacking):
            yield f"the weighed program has, and the traced one has not: {words}"
        prediction = self.weighing.prediction
        if not self.is_cpu and prediction is not None and prediction.step_seconds.high is None:
            yield f"no interval is predicted: only what takes over {MANY_TIMES:g} times as long is blamed"
        if self.is_cpu:
            yield "a CPU's rates depend on what else it runs: no kernel is blamed for being slow"
        if prediction is None:
            yield f"no time is predicted: {self.weighing.no_prediction}"


def _names(kind: str, names: Mapping[str, float]) -> str:
    """Return the name of what a cause has most seconds of; of small programs, two of them."""
    ranked = sorted(names, key=lambda name: -names[name])
    programs = [name for name in ranked if name.startswith("jit_")]
    return ", ".join(programs[:2] if kind == "small programs" and programs else ranked[:1])


def _seconds_by_format(weighing: Weighing) -> dict[str, float]:
    """Return the seconds of a FLOP of a product by number format, where its rate is known."""
    calibration = calibration_for(weighing.fleet)
    if calibration is None and weighing.fleet.chip.platform == "cpu":
        return {}
    machine = machine_of(weighing.fleet, calibration)
    rates = {name: machine.gemm_flops_per_second(name) for name in BITS}
    return {name: 1 / rate for name, rate in rates.items() if rate}


def _period(which: Sequence[int]) -> str:
    """Return how often the steps come, in words."""
    apart = {after - before for before, after in itertools.pairwise(which)}
    if len(apart) == 1 and (period := apart.pop()) > 1:
        return f", one in {period}"
    return f" (number {', '.join(str(index + 1) for index in which[:5])})" if which else ""


def _join_python(merged: dict[_Key, _Amount]) -> None:
    """Give Python's time in a function that launches many programs to these launches."""
    for (kind, where), amount in list(merged.items()):
        launched = merged.get(("small programs", where))
        if kind == "host" and launched is not None and where:
            launched.add(amount)
            del merged[kind, where]


def _join(merged: dict[_Key, _Amount], kind: str) -> None:
    """Make one cause of all of a kind, at the line that has most of its seconds."""
    keys = [key for key in merged if key[0] == kind]
    largest = max(keys, key=lambda key: (bool(key[1]), merged[key].seconds))
    whole = _Amount()
    for key in keys:
        whole.add(merged.pop(key))
    merged[largest] = whole


def _facts_by_item(recorded: Recorded) -> dict[Item, Work]:
    """Return one work of each item, which says what all of them are."""
    found: dict[Item, Work] = {}
    for work in recorded.work:
        found.setdefault(item_of(work), work)
    return found


def _seconds_by_kind(recorded: Recorded, num_steps: int) -> defaultdict[str, float]:
    """Return the seconds of whole events by kind, of one step on one device, hidden or not."""
    seconds: defaultdict[str, float] = defaultdict(float)
    num_devices = len(recorded.devices)  # looks at all of the work
    for work in recorded.work:
        seconds[work.kind] += work.seconds / num_steps / num_devices
    return seconds


def _compute(part: Mapping[str, float]) -> float:
    return sum(seconds for kind, seconds in part.items() if kind not in MESSAGE_KINDS)
