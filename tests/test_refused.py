"""A step that XLA refuses, since a device has too little memory, is a verdict with the compiler's figures.

No compiler for TPUs is installed where most of these tests run: a worker stands in, which answers as the one
does whose compiler refused the program. The last test asks libtpu.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.compiler import Refusal, _compile_process, figures_of
from meshwright.errors import CompileError, InputError
from meshwright.worker._reports import OutOfMemory, could_not_compile
from tests.commands import run

GIB = 2**30
EARLIER = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (98.50G) "
    "exceeds available HBM (80.00G)."
)
LATER = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 98.50G "
    "of 80.00G hbm. Exceeded hbm capacity by 18.50G. \n\nTotal hbm usage >= 99.00G:\n    reserved 530.00M"
)
REFUSAL = Refusal(
    needed_bytes=int(98.5 * GIB),
    usable_bytes=80 * GIB,
    words=EARLIER,
    compiler="XLA (tpu) of libtpu 0.0.42.1",
    seconds=2.0,
    mesh_axes=(("fsdp", 8),),
    num_parameters=8_030_261_248,
    tokens_per_step=65_536,
    argument_bytes_by_role={"optimizer_state": 8 * GIB, "parameters": 4 * GIB, "batch": 4096},
)


class Worker:
    """A worker that has ended."""

    def poll(self):
        return 0

    def end(self):
        pass


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """Let every compilation end with that refusal."""

    def start(work, made):
        (work / "answer.json").write_text(json.dumps({"refused": json.dumps(dataclasses.asdict(REFUSAL))}))
        return Worker()

    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_compile_process, "start_worker", start)


@pytest.mark.parametrize("words", [EARLIER, LATER])
def test_xlas_sentences_have_the_needed_and_the_usable_bytes(words):
    assert figures_of(words) == (int(98.5 * GIB), 80 * GIB)
    error = could_not_compile("llama3-8b for v5e-8", RuntimeError(words))
    assert isinstance(error, OutOfMemory)
    assert error.words in words
    assert "\n" not in error.words


@pytest.mark.parametrize(
    "words",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem.",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262144, available: 232448",
        "RESOURCE_EXHAUSTED: Out of memory allocating 137438953472 bytes.",
        "INTERNAL: an error",
    ],
)
def test_no_other_failure_of_the_compiler_is_a_verdict(words):
    error = could_not_compile("llama3-8b for v5e-8", RuntimeError(words))
    assert type(error) is CompileError
    assert words in error.message


def test_a_refused_step_does_not_fit_by_the_compilers_figures(refused):
    made = mw.weigh("llama3-8b", on="8xH100")
    assert made.fits is False
    assert made.line.endswith("does not fit, 98.5 GiB of 80.0 GiB per device, 18.5 GiB (23.1 %) too much")
    text = str(made)
    assert "DOES NOT FIT: 98.5 GiB of 80.0 GiB per device" in text
    assert "--set remat=full" in text  # what would help
    assert "offload=optimizer" in text
    assert made.plan_command is not None
    assert made.plan_command in " ".join(text.split())
    assert "DOES NOT FIT" in made.to_html()


def test_a_refused_step_lacks_what_was_not_compiled(refused):
    made = mw.weigh("llama3-8b", on="8xH100")
    fields = json.loads(made.to_json())
    assert fields["refusal"]["exceeded_bytes"] == REFUSAL.needed_bytes - REFUSAL.usable_bytes
    assert fields["fits"] is False
    assert fields["suggestions"]
    assert not {"ledger", "prediction", "no_prediction", "run_total", "traffic_by_axes"} & set(fields)
    assert set(fields["compile"]) == {"seconds", "compiler"}
    for asked in (lambda: made.ledger, lambda: made.compiled, made.trace):
        with pytest.raises(InputError, match=r"does not fit on 8xH100: it needs 98\.5 GiB of 80\.0 GiB"):
            asked()


def test_the_command_answers_with_json_and_status_3(refused):
    done = run("weigh", "llama3-8b", "--on", "8xH100", "--check", "--json")
    assert done.status == 3
    assert done.json["refusal"]["usable_bytes"] == REFUSAL.usable_bytes
    assert run("weigh", "llama3-8b", "--on", "8xH100").status == 0


def test_a_function_that_is_refused_does_not_fit_either(refused):
    step = jax.jit(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    made = mw.weigh(mw.jax_step(step, jnp.ones((8, 8)), jnp.ones((4, 8))), on="1xH100")
    assert made.fits is False
    assert "suggestions" in made.to_dict()
    assert "DOES NOT FIT" in str(made)


def test_a_plan_takes_refused_candidates_for_such_that_do_not_fit(refused, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_PLAN_WORKERS", "1")
    plan = mw.plan("linear", on="2xH100", budget_seconds=0.1)
    assert plan.best is None
    assert plan.candidates
    assert all(each.fits is False and not each.failed for each in plan.candidates)
    assert "98.5 GiB" in str(plan)


def test_the_largest_batch_of_a_run_that_is_always_refused_is_none(refused):
    found = mw.largest("llama3-8b", "batch", on="8xH100")
    assert found.value is None
    assert found.weighing.fits is False
    assert found.above_bytes == REFUSAL.needed_bytes


def test_changes_that_are_refused_too_are_listed_with_the_figures(refused):
    changes = mw.explain(mw.weigh("bytes-nano", on="2xH100"))
    assert changes
    assert all(each.fits is False and "98.5 GiB of 80.0 GiB" in each.failed for each in changes)
    assert "98.5 GiB of 80.0 GiB" in str(changes)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the tpu extra)")
def test_libtpu_refuses_a_step_that_is_too_large():
    made = mw.weigh("llama2-7b", on="v3-8", overrides=["batch.sequences=8", "batch.sequence_length=640"])
    assert made.fits is False
    assert made.refusal is not None
    assert made.refusal.argument_bytes_by_role["parameters"] > GIB
