from __future__ import annotations

import dataclasses
import json

from meshwright.torch_account import Account, flop_table, memory_table, module_table, unknown_table


def test_sums_of_an_account(made_account: Account):
    assert made_account.flops.model == 1000 + 2600 - 600
    assert made_account.flops.total == 1000 + 2600 + 50
    assert made_account.memory.hand_sum_bytes == 4000 + 5000 + 3000 + 6000


def test_an_account_is_json_with_a_schema(made_account: Account):
    found = json.loads(json.dumps(made_account.to_dict()))
    assert found["schema"] == 1
    assert found["source"] == "torch eager, one device, not compiled"
    assert found["flops"]["model"] == 3000
    assert found["memory"]["hand_sum_bytes"] == 18_000
    assert found["by_module"][1]["path"] == "a"
    assert found["unknown"] == {"aten._fft_r2c(fp32[4, 8])": 2}


def test_an_account_reads_as_aligned_tables(made_account: Account):
    lines = str(made_account).splitlines()
    assert lines[0] == "Net, 1K parameters, torch 2.13.0: torch eager, one device, not compiled"
    assert "saved activations        4.88 KiB   5,000  bf16, fp32" in lines
    assert "peak                     15.4 KiB  15,808  in the backward pass" in lines
    assert "recomputed    600 FLOP    600  part of backward" in lines
    assert "aten._fft_r2c(fp32[4, 8])      2" in lines
    assert lines[-2:] == ["One.", "Two."]


def test_memory_stands_by_what_it_holds_then_the_hand_sum_then_the_peak(made_account: Account):
    header, rows, numbers = memory_table(made_account.memory)
    assert [row[0] for row in rows] == [
        "parameters", "buffers", "gradients", "optimizer state", "inputs", "saved activations", "hand sum",
        "temporaries at the peak", "peak",
    ]  # fmt: skip
    assert numbers <= set(header)
    assert rows[6] == (
        "hand sum",
        "17.6 KiB",
        "18,000",
        "parameters, gradients, optimizer state, saved activations",
    )


def test_flops_stand_by_pass(made_account: Account):
    _, rows, _ = flop_table(made_account.flops)
    assert [(row[0], row[2]) for row in rows] == [
        ("forward", "1,000"), ("backward", "2,600"), ("recomputed", "600"), ("optimizer", "50"),
        ("model", "3,000"),
    ]  # fmt: skip


def test_the_most_expensive_module_comes_first_and_those_without_cost_are_left_out(
    made_account: Account,
):
    _, rows, _ = module_table(made_account)
    assert [row[0] for row in rows] == ["(all)", "a"]
    assert [row[0] for row in module_table(made_account, top=1)[1]] == ["(all)"]


def test_nothing_unknown_is_an_empty_table(made_account: Account):
    assert unknown_table(made_account)[1] == [("aten._fft_r2c(fp32[4, 8])", "2")]
    assert unknown_table(dataclasses.replace(made_account, unknown={}))[1] == []
