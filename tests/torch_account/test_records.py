from __future__ import annotations

import json

from meshwright.torch_account import Account


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
