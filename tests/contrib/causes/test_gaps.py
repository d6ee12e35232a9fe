"""Compare recorded steps, written down by hand, with the prediction of a weighing for GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.contrib.causes import HostSpan, Recorded, RecordedStep, Work, gap_of
from meshwright.predict import class_of

STEPS, DEVICES = 4, 8


@pytest.fixture(scope="module")
def weighing():
    large = {"model.input_dim": 16384, "batch.sequences": 65536}
    return mw.weigh("linear", on="8xH100", overrides=large)


@dataclasses.dataclass
class Drawn:
    """A step as the prediction draws it: kernels first, then messages. Each argument changes it somewhere.

    `slower`: by class, how many times as long. `gap`: idle seconds before the messages. `late`: seconds that
    the last device's kernels take longer, for which the others wait in their messages.
    """

    weighing: mw.Weighing
    slower: dict[str, float] = dataclasses.field(default_factory=dict)
    between: float = 0.0
    gap: float = 0.0
    late: float = 0.0
    devices: int = DEVICES

    def record(self, host: tuple[HostSpan, ...] = ()) -> Recorded:
        work: list[Work] = []
        steps: list[RecordedStep] = []
        now = 1.0
        for index in range(STEPS):
            ends = [self._device(index, device, now, work) for device in range(self.devices)]
            end = max(ends) + self.between
            steps.append(RecordedStep(rank=0, index=index, begin_seconds=now, end_seconds=end))
            now = end
        return Recorded(profiler="jax", files=("t",), steps=tuple(steps), work=tuple(work), host=host)

    def _device(self, index: int, device: int, begin: float, work: list[Work]) -> float:
        now = begin
        late = self.late if device == self.devices - 1 else 0.0
        prediction = self.weighing.prediction
        assert prediction is not None
        launch = prediction.seconds_by_kind["idle"]
        for part in sorted(prediction.slices, key=lambda part: part.kind == "communication"):
            name = class_of(part.name)
            if name == "launch":
                continue
            message = part.kind == "communication"
            seconds = part.exposed_seconds * self.slower.get(name, 1.0)
            seconds += late if not message else 0.0
            seconds += self.late - late if message else 0.0
            late = 0.0 if not message else late
            now += launch + self.gap if message else 0.0
            if seconds:
                facts = {"run": f"{index}", "program": "jit_step(1)", "source": "model.py:7", "name": name}
                work.append(
                    Work(
                        kind=name,
                        rank=0,
                        device=f"0/{device}",
                        stream="1",
                        begin_seconds=now,
                        seconds=seconds,
                        **facts,
                    )
                )
            now += seconds
        return now


def _kinds(gap: mw.Gap) -> dict[str, float]:
    return {cause.kind: cause.seconds for cause in gap.causes}


def _expected(weighing: mw.Weighing) -> float:
    assert weighing.prediction is not None
    return weighing.prediction.step_seconds.expected


def test_a_step_that_takes_what_is_predicted_has_no_cause_and_no_rest(weighing):
    gap = gap_of(Drawn(weighing).record(), weighing)
    assert gap.causes == ()
    assert gap.gap_seconds == pytest.approx(0.0, abs=1e-9)
    assert "unexplained" in str(gap)


def test_kernels_slower_than_the_interval_allows_are_blamed_for_what_lies_above_it(weighing):
    gap = gap_of(Drawn(weighing, slower={"matmul": 4.0}).record(), weighing)
    (cause,) = [each for each in gap.causes if each.kind == "slow work"]
    assert (cause.name, cause.where) == ("matmul", "model.py:7")
    assert 0 < cause.seconds < gap.gap_seconds
    assert cause.seconds + gap.unexplained_seconds == pytest.approx(gap.gap_seconds)


def test_time_between_runs_without_any_event_of_the_host_is_the_hosts(weighing):
    pause = _expected(weighing)
    gap = gap_of(Drawn(weighing, between=pause).record(), weighing)
    assert _kinds(gap)["host"] == pytest.approx(pause)


def test_the_hosts_spans_tell_what_the_devices_wait_for(weighing):
    pause = _expected(weighing)
    drawn = Drawn(weighing, between=pause)
    steps = drawn.record().steps
    spans = tuple(
        HostSpan(
            name="next_batch",
            kind="data",
            rank=0,
            thread="main",
            begin_seconds=step.end_seconds - pause,
            seconds=pause,
            source="train.py:12",
        )
        for step in steps
    )
    (cause,) = gap_of(drawn.record(host=spans), weighing).causes
    assert (cause.kind, cause.where) == ("input", "train.py:12")
    assert cause.seconds == pytest.approx(pause)


def test_gaps_between_kernels_of_one_run_are_the_launches(weighing):
    gap = gap_of(Drawn(weighing, gap=_expected(weighing)).record(), weighing)
    assert list(_kinds(gap)) == ["gaps"]


def test_a_device_that_is_slow_in_each_step_is_named_with_what_the_others_wait(weighing):
    late = _expected(weighing)
    gap = gap_of(Drawn(weighing, late=late).record(), weighing)
    cause = next(each for each in gap.causes if each.kind == "straggler")
    assert cause.name == "device 7"
    assert 0 < cause.seconds <= late


def test_more_devices_than_the_fleet_has_are_refused(weighing):
    whole = Drawn(weighing).record()
    more = replace(whole.work[0], device="0/99")
    with pytest.raises(mw.InputError, match="the trace has 9 devices, and 8xH100 has 8"):
        gap_of(replace(whole, work=(*whole.work, more)), weighing)


def test_a_time_alone_names_no_cause():
    gap = mw.reconcile("linear", on="8xH100", measured="1s")
    assert gap.causes == ()
    assert gap.unexplained_seconds == pytest.approx(gap.gap_seconds)
    assert gap.could_be
    assert "(no interval)" in str(gap)
    assert mw.reconcile("linear", on="8xH100", measured="1us").could_be == ()
    assert "a step's time alone tells none" in gap.not_compared["causes"]


@pytest.mark.parametrize(
    ("took", "words"),
    [
        ({"measured": "1s", "tokens_per_second": 5}, "given twice"),
        ({"measured": 0.0}, "was not measured"),
        ({"tokens_per_second": -1}, r"is no rate|does not say"),
        ({}, "nothing is measured"),
        ({"trace": ()}, "no file of a trace"),
        ({"trace": 3}, "^3 is not the name of a trace"),
        ({"trace": [3]}, "^3 is not the name of a trace"),
        ({"measured": [1]}, r"^\[1\] is not a step's time"),
        ({"tokens_per_second": {}}, r"not a number of tokens|does not say"),
    ],
)
def test_what_is_no_measurement_is_refused_in_words(took, words):
    with pytest.raises(mw.InputError, match=words):
        mw.reconcile("linear", on="8xH100", **took)


def test_the_folder_of_a_run_is_said_to_have_its_own_fleet_and_measurement(tmp_path):
    (tmp_path / "measurement.json").write_text("{}")
    with pytest.raises(mw.InputError, match="is the folder of a run, which says itself on which fleet") as no:
        mw.reconcile(tmp_path, on="8xH100")
    assert f"leave --on out: meshwright reconcile {tmp_path}" in no.value.hint


def test_without_an_interval_only_what_is_ten_times_too_slow_is_blamed():
    small = mw.weigh("linear", on="8xH100")  # mostly gaps, so that no interval is predicted
    assert small.prediction is not None
    assert small.prediction.step_seconds.high is None
    slow = gap_of(Drawn(small, slower={"all-reduce": 30.0}).record(), small)
    (cause,) = [each for each in slow.causes if each.name == "all-reduce"]
    exposed = {class_of(each.name): each.exposed_seconds for each in small.prediction.slices}
    assert cause.seconds == pytest.approx(20 * exposed["all-reduce"])
    assert any("no interval is predicted" in note for note in slow.notes)
    assert gap_of(Drawn(small, slower={"all-reduce": 9.0}).record(), small).causes == ()
