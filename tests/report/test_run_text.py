from __future__ import annotations

from meshwright.reconciliation import Reconciliation, Row
from meshwright.report import run_text

ROWS = (
    Row(quantity="argument bytes", unit="bytes", predicted=2**20, measured=2**20, how="live arrays"),
    Row(quantity="executed FLOPs", unit="FLOP", predicted=3e9, measured=0, how="a count of [nothing]"),
    Row(
        quantity="step seconds",
        unit="seconds",
        predicted=0.012,
        measured=0.016,
        how="the clock",
        low=0.01,
        high=0.014,
    ),
    Row(quantity="MFU", unit="share", predicted=0.5, measured=0.4, how="model FLOPs over the median step"),
)
COMPARED = Reconciliation(
    same_program=True, rows=ROWS, not_compared={"model FLOPs": "nothing sees them alone"}
)
NOTHING = Reconciliation(same_program=True, rows=(), not_compared={})


def test_a_run_reads_as_agreed(measurement, golden):
    golden("run.txt", run_text(measurement(), COMPARED))


def test_an_interrupted_run_says_so_and_shows_what_it_has(measurement, plain):
    nothing = {"held_out_losses": {}, "step_seconds": None, "sample": "", "sample_prompt": ""}
    made = measurement(signal="SIGINT", steps=1, losses={1: 5.75}, **nothing)
    text = plain(run_text(made, NOTHING))
    assert text.startswith("1 steps, interrupted on 1 x cpu\ntraining loss 5.750 at step 1\n")
    assert "What it writes" not in text


def test_a_sample_cannot_command_the_terminal(measurement, plain):
    text = plain(run_text(measurement(sample="a\x1b[31mred\x07\r\tb\x9bx"), NOTHING))
    assert not set(text) & {"\x1b", "\x07", "\r", "\t", "\x9b"}
    assert "a�[31mred��    b�x" in text


def test_a_long_sample_is_cut(measurement, plain):
    text = plain(run_text(measurement(sample="line\n" * 40), NOTHING))
    assert text.count("line") == 12
