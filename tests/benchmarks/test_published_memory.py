"""The memory of published rows: what their frameworks keep otherwise."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _published_memory import EXCHANGED, INPUTS, SLOTS, TABLES, memory_of, print_memory
from _published_rows import express_measured
from _published_stacks import Stack
from _published_table import rows_of

MEGATRON = Stack(name="Megatron", head_in_last_stage=True, repeats_nothing=True)
OURS = Stack(name="ours")
RUNS = Path(__file__).parents[2] / "benchmarks" / "simumax_b200.toml"
TABLE = 128256 * 8192
GIB = 2**30


def row_of(number: int, stack: Stack = MEGATRON):
    """A row of SimuMax's, as a run of ours."""
    row = rows_of(RUNS)[number - 1]
    assert row["id"] == f"simumaxb200-{number:03}"
    return dataclasses.replace(express_measured(row), stack=stack)


def ledger(gib: float, *buffers: tuple[str, str, float]):
    """What a ledger says of its peak; each buffer's category, shape and GiB."""
    held = [
        SimpleNamespace(category=category, shape=shape, num_bytes=int(size * GIB))
        for category, shape, size in buffers
    ]
    return SimpleNamespace(peak_bytes=int(gib * GIB), buffers=held)


def test_every_row_of_simumax_is_a_run_of_ours():
    rows = [express_measured(row) for row in rows_of(RUNS)]
    assert len(rows) == 31
    assert {row.config.layout for row in rows} == {
        *("tensor=8", "data=2,tensor=4", "data=4,tensor=2", "stage=2,data=4"),
        *("context=4,tensor=2", "context=8"),
    }
    assert all(row.config.zero1 == (row.config.layout != "tensor=8") for row in rows)
    assert rows[9].measured_peak_bytes == pytest.approx(66.55 * GIB)


def test_megatrons_first_stage_holds_two_microbatches_of_our_four_and_one_table():
    """Of one and a half tables in a step it holds one: 2 bytes of a weight and 4 of its gradient. Of two
    microbatches it keeps six layers' inputs of products: two norms' outputs, and gate times up."""
    waiting = ("saved_activations", "bf16[4,6,1,4096,8192]", 4.0), ("other", "bf16[4,6,1,4096,8192]", 4.0)
    others = ("gradients", "f32[6,8192,28672]", 5.0), ("saved_activations", "bf16[6,1,4096,8192]", 1.0)
    found = memory_of(row_of(10), ledger(80.0, *waiting, *others))
    inputs = 2 * 6 * 4096 * 2 * (8192 + 8192 + 28672) / GIB
    assert found["otherwise_gib"] == pytest.approx(
        {INPUTS: inputs, SLOTS: -4.0, TABLES: -TABLE / 2 * 6 / GIB}, rel=1e-4
    )
    assert found["memory_error"] == pytest.approx((80 + inputs - 4 - TABLE * 3 / GIB) / 66.55 - 1, abs=1e-4)


def test_over_context_attentions_output_is_kept_on_both_sides_of_the_exchange():
    """Twelve layers of 32,768 / 4 tokens, half of the width on each of two devices along tensor."""
    found = memory_of(row_of(13), ledger(64.0))["otherwise_gib"]
    exchanged = 12 * 8192 * 2 * 8192 / 2 / GIB
    assert found == pytest.approx({INPUTS: 5.5 * exchanged, EXCHANGED: exchanged}, rel=1e-4)
    assert set(memory_of(row_of(1), ledger(28.0))["otherwise_gib"]) == {INPUTS}


def test_nothing_is_otherwise_in_a_stack_like_ours():
    row = row_of(10, OURS)
    found = memory_of(row, ledger(90.0))
    assert found["otherwise_gib"] == {}
    assert found["memory_error"] == pytest.approx(90 * GIB / row.measured_peak_bytes - 1, abs=1e-5)


def test_a_row_that_states_no_plain_number_has_no_memory():
    row = rows_of(RUNS)[0]
    for words in ("", "about 30", "28-30"):
        silent = express_measured({**row, "peak_mem_gib_per_device": words})
        assert memory_of(silent, ledger(28.0)) == {}


def test_the_memory_of_rows_is_printed_with_how_many_are_near(capsys):
    rows = [
        {"id": row.id, "layout": row.config.layout, **memory_of(row, ledger(gib))}
        for row, gib in ((row_of(1, OURS), 28.29), (row_of(4, OURS), 50.0))
    ]
    print_memory([*rows, {"id": "another", "failed": "no memory"}])
    told = capsys.readouterr().out
    assert " 28.3    +0.0    28.3   +0.0 %" in told.replace("-0.0", "+0.0")
    assert "2 rows: median 14.0 %, 1 within 5 %" in told
