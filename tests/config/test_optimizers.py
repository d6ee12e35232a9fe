import pytest

from meshwright.config import load_config
from meshwright.errors import InputError


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rate=0", "learning_rate"),
        ("optimizer.beta1=1.0", "beta1"),
        ("optimizer.kind=adamy", "adamw"),
        ("schedule.final_fraction=1.5", "final_fraction"),
    ],
)
def test_figures_that_make_no_optimizer_are_refused(override, words):
    with pytest.raises(InputError, match=words):
        load_config("bytes-10m", [override])


@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "muon"])
def test_nesterov_without_momentum_is_refused(kind):
    chosen = [f"optimizer.kind={kind}", "optimizer.momentum=0.0", "optimizer.nesterov=true"]
    with pytest.raises(InputError, match="nesterov = true, but momentum = 0 leaves no momentum") as caught:
        load_config("bytes-nano", chosen)
    assert "set optimizer.momentum" in caught.value.hint


@pytest.mark.parametrize(
    ("schedule", "path", "hint"),
    [
        (("cosine", 20), "schedule.warmup_steps = 20 is not below steps = 20", "warmup_steps = 19"),
        (("linear", 30), "schedule.warmup_steps = 30 is not below steps = 20", "warmup_steps = 19"),
        (
            ("stable-then-decay", 5, 16),
            "schedule.decay_steps = 16 after schedule.warmup_steps = 5 is longer than steps = 20",
            "decay_steps = 15",
        ),
        (("stable-then-decay", 20, 1), "schedule.warmup_steps = 20 is not below", "warmup_steps = 19"),
    ],
)
def test_phases_of_a_schedule_that_find_no_room_are_refused(schedule, path, hint):
    keys = ("kind", "warmup_steps", "decay_steps")
    overrides = [f"schedule.{key}={value}" for key, value in zip(keys, schedule, strict=False)]
    with pytest.raises(InputError, match=path) as caught:
        load_config("bytes-nano", overrides)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "schedule", [("constant", 50), ("inverse-square-root", 50), ("stable-then-decay", 5, 15), ("linear", 19)]
)
def test_phases_that_end_with_the_run_or_have_no_end_are_taken(schedule):
    keys = ("kind", "warmup_steps", "decay_steps")
    overrides = [f"schedule.{key}={value}" for key, value in zip(keys, schedule, strict=False)]
    assert load_config("bytes-nano", overrides).schedule.warmup_steps == schedule[1]
