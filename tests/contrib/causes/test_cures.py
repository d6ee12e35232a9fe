"""The change that would cure a cause is weighed where the program can be changed; else its time is said."""

from __future__ import annotations

import dataclasses
import json

import pytest

import meshwright as mw
from meshwright.contrib.causes import Asked, gap_of, kineto_trace
from tests.contrib.causes.test_gaps import Drawn
from tests.contrib.causes.test_kineto import eager_step

SLOW = {"matmul": 4.0}
RUN = {
    "model.num_layers": 2,
    "model.embed_dim": 1024,
    "model.mlp_dim": 4096,
    "batch.sequences": 2048,
    "precision": "bf16",
    "remat": "full",
}


@pytest.fixture(scope="module")
def weighing():
    return mw.weigh("linear", on="8xH100", overrides={"model.input_dim": 16384, "batch.sequences": 65536})


@pytest.fixture(scope="module")
def transformer():
    return mw.weigh("bytes-nano", on="8xH100", overrides=RUN)


def _cause(gap, kind):
    return next(each for each in gap.causes if each.kind == kind)


def test_before_it_is_asked_for_no_change_is_weighed_and_the_seconds_are_an_upper_bound(weighing):
    gap = gap_of(Drawn(weighing, slower=SLOW).record(), weighing)
    slow = _cause(gap, "slow work")
    assert gap.changes == ()
    assert slow.saving_seconds == pytest.approx(slow.seconds)
    assert "saves up to" in slow.saving
    assert "--cures" in slow.saving


@pytest.mark.wide  # compiles a step of a transformer four times
def test_a_configuration_is_weighed_with_the_changes_and_the_best_is_named(transformer):
    gap = gap_of(Drawn(transformer, slower=SLOW).record(), transformer).with_cures(most=2)
    slow = _cause(gap, "slow work")
    seconds = {
        f"--set remat={name}": mw.weigh("bytes-nano", on="8xH100", overrides={**RUN, "remat": name})
        for name in ("none", "alternate-dots")
    }
    best = min(seconds, key=lambda name: seconds[name].step_seconds or 0.0)
    reserved = [each.ledger.memory.reserved_bytes for each in (transformer, seconds[best])]
    assert [each.arguments for each in gap.changes] == list(seconds)
    assert slow.change == best
    assert slow.saving_seconds == pytest.approx(transformer.step_seconds - seconds[best].step_seconds)
    assert slow.saved_bytes == reserved[0] - reserved[1]
    assert slow.fits is True
    assert slow.saving.startswith("weighed: saves ")
    assert "Changes that were weighed" in str(gap)
    fields = json.loads(gap.to_json())
    assert [each["arguments"] for each in fields["changes"]] == list(seconds)
    assert "asked" not in fields
    named = sum(each.seconds for each in gap.causes)
    assert named + gap.unexplained_seconds == pytest.approx(gap.gap_seconds)


@pytest.mark.wide
def test_no_more_changes_are_weighed_than_was_said(transformer):
    gap = gap_of(Drawn(transformer, slower=SLOW).record(), transformer)
    assert gap.with_cures(most=0).changes == ()
    late = gap.with_cures(seconds=-1.0)
    assert late.changes == ()
    assert "2 further changes are not weighed: at most 4, and none after -1 s" in late.notes


def test_a_change_that_is_not_faster_is_not_named(weighing):
    gap = gap_of(Drawn(weighing, gap=weighing.step_seconds).record(), weighing)
    gaps = _cause(gap.with_cures(), "gaps")
    assert gaps.change == ""
    assert "the program has no settings" in gaps.saving


def test_what_the_host_does_saves_its_own_seconds_at_most(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    weighed = mw.weigh("tests.contrib.causes.torch_program:program", on="1xH100")
    gap = gap_of(kineto_trace([eager_step(item=True).write(tmp_path / "t.json")]), weighed)
    waits = _cause(gap, "synchronization")
    assert waits.saving_seconds == pytest.approx(waits.seconds)
    assert waits.saving.startswith("saves up to ")
    assert "--cures" not in waits.saving


def test_what_the_weighed_program_lacks_is_weighed_without_it_and_says_whether_that_fits(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    weighed = mw.weigh("tests.contrib.causes.torch_program:program", on="1xH100")
    gap = gap_of(kineto_trace([eager_step(extra=1).write(tmp_path / "t.json")]), weighed)
    extra = _cause(gap, "extra work")
    assert extra.fits is True
    assert "weighed without it: saves up to" in extra.saving
    assert "fits: it needs" in extra.saving


def test_the_arguments_of_a_function_are_weighed(weighing, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import jax, jax.numpy as jnp\n\n"
        "def build(mesh, *, again: bool = True):\n"
        "    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)\n"
        "    return jax.jit(lambda x: x @ x @ x if again else x @ x), (x,)\n"
    )
    program = mw.jax_step(f"{path}:build")
    made = mw.weigh(program, on="1xH100")
    gap = gap_of(Drawn(made, slower={"matmul": 9.0}, devices=1).record(), made)
    gap = dataclasses.replace(gap, asked=Asked(weighing=made, program=program)).with_cures()
    assert _cause(gap, "slow work").change == "--set again=False"
    assert [each.arguments for each in gap.changes] == ["--set again=False"]


def test_cures_without_a_trace_are_refused(meshwright):
    done = meshwright("reconcile", "linear", "--on", "8xH100", "--measured", "1s", "--cures")
    assert (done.status, "--cures weighs changes for the causes that a trace tells" in done.talk) == (2, True)
