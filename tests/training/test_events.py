import statistics

import pytest

from meshwright.trainer.loop import (
    CheckpointSaved,
    Evaluated,
    Finished,
    FirstStepsDone,
    PhaseClock,
    Sampled,
    Started,
    StepCompiled,
    StepDone,
)

pytestmark = pytest.mark.quick


def test_a_run_tells_what_happens_in_order(one_device):
    kinds = [type(event) for event in one_device.events]
    three = [StepDone] * 3
    # Five steps are timed once the first two are left out; one checkpoint is due, after the last step.
    steps = [*three, Evaluated, *three, Evaluated, StepDone, FirstStepsDone, Evaluated, CheckpointSaved]
    assert kinds == [Started, StepCompiled, Evaluated, *steps, Sampled, Finished]


def test_events_carry_what_the_measurement_keeps(one_device):
    events, measurement = one_device.events, one_device.measurement
    steps = [event for event in events if isinstance(event, StepDone)]
    assert {event.step: event.loss for event in steps} == measurement.losses
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert {event.step: event.held_out_loss for event in evaluated} == measurement.held_out_losses
    assert steps[-1].seconds_left == 0
    timed = [measurement.tokens_per_step / each.tokens_per_second for each in steps[2:6]]
    assert steps[5].seconds_left >= 0.999 * statistics.fmean(timed), "of the steps so far, with their waits"
    assert all(event.steps == 7 for event in steps)
    started = events[0]
    assert isinstance(started, Started)
    # 256 x 64 embedding and head; per layer 64 x (64 + 2 x 32) + 64 x 64 attention, 3 x 64 x 128 gated
    # MLP, two norms; a last norm.
    assert started.num_parameters == 2 * 256 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def test_a_phase_within_another_interrupts_it_and_all_add_up():
    readings = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    phases = PhaseClock(lambda: next(readings))
    with phases.of("step"):  # at 1
        with phases.of("evaluation"):  # at 3
            assert phases.current == "evaluation"
        assert phases.current == "step"  # at 6
    assert phases.current == "start-up"  # at 10
    assert phases.seconds() == {"start-up": 1.0 + 5.0, "step": 2.0 + 4.0, "evaluation": 3.0}
