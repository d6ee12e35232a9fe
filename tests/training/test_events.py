from meshwright.training import (
    CheckpointSaved,
    Compiled,
    Evaluated,
    Finished,
    FirstStepsDone,
    Sampled,
    Started,
    StepDone,
)


def test_a_run_tells_what_happens_in_order(one_device):
    kinds = [type(event) for event in one_device.events]
    three = [StepDone] * 3
    # Five steps are timed once the first two are left out; one checkpoint is due, after the last step.
    steps = [*three, Evaluated, *three, Evaluated, StepDone, FirstStepsDone, Evaluated, CheckpointSaved]
    assert kinds == [Started, Compiled, Evaluated, *steps, Sampled, Finished]


def test_events_carry_what_the_measurement_keeps(one_device):
    events, measurement = one_device.events, one_device.measurement
    steps = [event for event in events if isinstance(event, StepDone)]
    assert {event.step: event.loss for event in steps} == measurement.losses
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert {event.step: event.held_out_loss for event in evaluated} == measurement.held_out_losses
    assert steps[-1].seconds_left == 0
    assert all(event.steps == 7 for event in steps)
    started = events[0]
    assert isinstance(started, Started)
    # 256 x 64 embedding and head; per layer 64 x (64 + 2 x 32) + 64 x 64 attention, 3 x 64 x 128 gated
    # MLP, two norms; a last norm.
    assert started.num_parameters == 2 * 256 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
