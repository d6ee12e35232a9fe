"""The finish of weighed runs: what is taken from the program, and where it is said."""

from __future__ import annotations

import dataclasses

import pytest

import meshwright as mw
from meshwright.contrib.finishing import workload_of


@pytest.fixture(scope="module")
def weighing():
    return mw.weigh("bytes-nano", on="8xH100", run=mw.RunLength(tokens="100B"))


def test_a_weighing_with_tokens_says_when_it_is_finished(weighing):
    finish = weighing.finish
    assert finish.seconds.expected > weighing.run_total.seconds.expected
    _, _, after = str(weighing).partition("\n  not known: ")
    (_, second, *_) = after.splitlines()
    assert second.startswith("  ")  # the questions take two lines, and both are indented
    assert "FINISH: " in str(weighing)
    assert "finish" in weighing.to_dict()
    assert mw.weigh("bytes-nano", on="8xH100").finish is None


def test_a_checkpoint_has_the_bytes_of_the_whole_state_and_waits_for_the_link(weighing):
    work = workload_of(
        weighing.prediction, weighing.num_steps, weighing.fleet, weighing.compiled, weighing.config
    )
    parameters = weighing.compiled.num_parameters
    assert work.checkpoint_bytes == pytest.approx(12 * parameters, rel=0.01)  # fp32, with two moments
    link = weighing.fleet.chip.host.bytes_per_second
    assert work.copy_seconds >= 12 * parameters / 8 / link
    held_out = weighing.config.evaluation
    assert work.extra_share == pytest.approx(held_out.batches / held_out.every_steps / 3, rel=0.1)


def test_a_program_without_a_configuration_is_asked_for_its_checkpoints(weighing):
    made = dataclasses.replace(weighing, config=None).finish
    assert made.save_every_seconds is None
    assert any("--checkpoint-seconds" in question for question in made.questions)
