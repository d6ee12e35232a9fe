"""Steps that ran on one card, predicted today: what `docs/results/measured.md` says of them."""

import pytest

import meshwright as mw

GPT2 = ("batch.sequences=32", "batch.sequence_length=1024")
LLAMA = ("batch.sequences=4", "batch.sequence_length=2048")


@pytest.mark.wide
@pytest.mark.once
@pytest.mark.parametrize(
    ("preset", "settings", "chip", "measured_seconds"),
    [
        ("gpt2-124m", GPT2, "H100", 0.0669),  # records 2026-11-27_train_gpu and 2026-11-26_train_gpu
        ("llama-1b", LLAMA, "H200", 0.130),
        ("llama-1b", (*LLAMA, "precision=fp8"), "H100", 0.119),
    ],
)
def test_a_step_of_one_card_is_predicted_within_ten_percent(preset, settings, chip, measured_seconds):
    overrides = ["batch.microbatch_sequences=none", *settings]
    weighed = mw.weigh(preset, on=f"1x{chip}", overrides=overrides)
    assert weighed.prediction is not None
    seconds = weighed.prediction.step_seconds
    assert seconds.expected == pytest.approx(measured_seconds, rel=0.1)
    assert seconds.low is not None
    assert seconds.high is not None
    assert seconds.low < measured_seconds < seconds.high
    assert "one H200 and one H100" in weighed.prediction.basis
