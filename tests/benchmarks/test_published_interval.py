import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import _published_score
from _published_interval import ends_of, interval_of, quantiles, waits_in, weights, with_left_out
from _published_rows import express_measured
from _published_score import score, scored_again, spread
from test_published_rows import QWEN

from meshwright.predict import ends_with_waits, widths
from tests.benchmarks.rows import SIZES


def rows(source, ratios):
    return [{"source": source, "error": 1 / ratio - 1} for ratio in ratios]


def test_a_source_with_many_rows_counts_for_no_more_than_the_most():
    assert weights(["a"] * 60 + ["b"], 30).tolist() == [0.5] * 60 + [1.0]


def test_quantiles_of_one_source_are_its_own():
    ratios = np.exp(np.linspace(-0.1, 0.1, 21))
    low, high = quantiles(ratios, ["a"] * 21)
    assert np.log([low, high]) == pytest.approx([-0.0945, 0.0945], abs=2e-3)


def test_sources_alike_are_held_nine_in_ten_also_when_left_out():
    made = np.random.default_rng(0)
    found = interval_of([row for name in "abcdef" for row in rows(name, np.exp(made.normal(0, 0.1, 200)))])
    assert found["low"] == pytest.approx(np.exp(-1.645 * 0.1), rel=0.03)
    assert found["holds"] == pytest.approx(0.9, abs=0.02)
    assert found["left_out_holds"] == pytest.approx(0.9, abs=0.03)


def test_a_source_unlike_all_others_is_not_held_when_left_out():
    found = interval_of([*rows("a", np.linspace(0.95, 1.05, 20)), *rows("b", np.linspace(1.9, 2.1, 20))])
    assert found["left_out_holds"] == 0.0
    assert found["holds"] > 0.8


def test_one_source_alone_says_nothing_of_others():
    assert "left_out_holds" not in interval_of(rows("a", [0.9, 1.0, 1.1]))


def of_width(source, number, ratio, waits=0.0, width="hopper"):
    """Return a scored row whose step took `ratio` times as long as predicted, and waited for a share."""
    exposed = {"matmul": 1 - waits, "all-gather[fsdp]": waits}
    own = {"id": f"{source}-{number}", "source": source, "width": [width], "error": 1 / ratio - 1}
    return {
        **own,
        "predicted_seconds": 1.0,
        "exposed_seconds": exposed,
        "otherwise_seconds": {},
        "holds": True,
    }


def held_left_out(rows):
    return {row["id"]: row.get("holds_left_out") for row in with_left_out(rows)}


def test_a_width_is_that_of_other_sources():
    others = [of_width("a", n, ratio) for n, ratio in enumerate(np.linspace(0.9, 1.1, 20))]
    found = held_left_out([*others, of_width("b", 0, 1.05), of_width("b", 1, 1.3)])
    assert found["b-0"]
    assert not found["b-1"]


def test_a_run_that_waits_for_messages_may_take_longer():
    others = [of_width("a", n, ratio) for n, ratio in enumerate(np.linspace(0.9, 1.1, 20))]
    assert held_left_out([*others, of_width("b", 0, 1.3, waits=0.6)])["b-0"]
    # Had a's runs waited as much, they would say little of what lies beside waits.
    waiting = [of_width("a", n, ratio, waits=0.6) for n, ratio in enumerate(np.linspace(0.9, 1.1, 20))]
    assert not held_left_out([*waiting, of_width("b", 0, 1.1)])["b-0"]


def test_few_runs_of_a_width_have_that_of_all_and_experts_of_one_source_have_none():
    others = [of_width("a", n, ratio, width="a100") for n, ratio in enumerate(np.linspace(0.9, 1.1, 20))]
    found = held_left_out([*others, of_width("b", 0, 1.05), {**of_width("b", 1, 1.05), "width": ["experts"]}])
    assert found["b-0"]
    assert found["b-1"] is None


LLAMA = {
    "id": "someone-001",
    "model": "Llama-3-8B",
    **SIZES,
    "accelerator": "A100-80GB-SXM",
    "n_devices": "64",
    "precision": "bf16",
    "sharding": "FSDP2",
    "micro_batch_per_device": "1",
    "global_batch_seqs": "64",
    "act_ckpt": "full",
    "step_time_s": "2.8",
}


def test_a_row_of_a_record_gets_the_interval_of_today():
    """Widths may have changed since: those of a record are not carried over, but none stays none."""
    row = express_measured(LLAMA)
    exposed = {"matmul": 2.4, "reduce-scatter[fsdp]": 0.6}
    told = {"layout": row.config.layout, "predicted_seconds": 3.0, "exposed_seconds": exposed}
    told |= {"otherwise_seconds": {}, "low_seconds": 2.99, "high_seconds": 3.01}
    found = scored_again(row, told)
    low, high = ends_of(found["width"], 0.2)
    assert found["width"] == ["a100"]
    assert (low, high) == ends_with_waits(widths()["a100"].low, widths()["a100"].high, 0.2)
    assert waits_in(exposed) == 0.6
    assert found["high_seconds"] == pytest.approx(high * found["predicted_seconds"], rel=1e-3)
    assert found["low_seconds"] == pytest.approx(low * found["predicted_seconds"], rel=1e-3)
    without = {key: value for key, value in told.items() if key not in ("low_seconds", "high_seconds")}
    assert "holds" not in scored_again(row, without)


def test_a_row_of_experts_has_the_same_interval_compiled_and_from_a_record(monkeypatch):
    row = express_measured({**QWEN, "tokens_per_s_per_device": "10000"})
    slices = {"matmul": 2.4, "all-to-all[expert]": 0.6}
    walked = _published_score.Walked(
        seconds=3.0,
        total=slices,
        exposed=slices,
        flops=Counter({"fp8-e4m3": 1}),
        transfers={"all-to-all[expert]": "expert"},
    )
    flops, memory = SimpleNamespace(model=1, executed=1), SimpleNamespace(reserved_bytes=1)
    ledger = SimpleNamespace(flops=flops, unpriced=(), memory=memory)
    compiled = SimpleNamespace(mesh_axes={}, routing=None, tokens_per_step=1)
    weighed = SimpleNamespace(ledger=ledger, compiled=compiled, folder=None)
    monkeypatch.setattr(_published_score, "weighed_run", lambda row, notes: (weighed, "full"))
    monkeypatch.setattr(_published_score, "executions_in", lambda *given: None)
    monkeypatch.setattr(_published_score, "walk", lambda *given, **options: walked)
    monkeypatch.setattr(_published_score, "memory_of", lambda *given: {})
    found = score(row)
    assert found["width"] == ["hopper-fp8", "experts"]
    again = scored_again(row, found)
    ends = ("low_seconds", "high_seconds")
    assert [found[end] for end in ends] == pytest.approx([again[end] for end in ends], rel=1e-3)


def test_rows_without_an_interval_are_no_misses():
    rows = [{"error": 0.1, "holds": True}, {"error": 0.1, "holds": False}, {"error": 0.1}]
    assert (spread(rows)["holds"], spread(rows)["without_interval"]) == (0.5, 1)
    assert "holds" not in spread(rows[2:])
