from __future__ import annotations

import dataclasses

from meshwright.report import account_text
from meshwright.torch_account import Account, FlopCount, MemoryCount, ModuleCount

ACCOUNT = Account(
    name="Net",
    num_parameters=1000,
    flops=FlopCount(
        forward=1000,
        backward=2600,
        recomputed=600,
        optimizer=50,
        by_operation={"aten.mm": 3600},
        by_format={"bf16": 3600},
    ),
    memory=MemoryCount(
        parameters_bytes=4000,
        buffers_bytes=8,
        gradients_bytes=3000,
        optimizer_state_bytes=6000,
        inputs_bytes=100,
        saved_activation_bytes=5000,
        temporary_peak_bytes=700,
        peak_bytes=15_808,
        peak_phase="backward",
        at_peak={"parameters": 4000, "temporaries": 700},
        by_format={"parameters": {"fp32": 4000}, "saved activations": {"fp32": 1000, "bf16": 4000}},
    ),
    by_module=(
        ModuleCount(
            path="layers.0",
            kind="Linear",
            num_parameters=900,
            forward_flops=600,
            backward_flops=1200,
            recomputed_flops=0,
            saved_activation_bytes=5000,
        ),
    ),
    unknown={"aten._fft_r2c(fp32[4, 8])": 2},
    conventions=("One sentence.", "[Another] sentence."),
    torch_version="2.13.0",
)


def test_an_account_reads_as_agreed(golden):
    golden("account.txt", account_text(ACCOUNT))


def test_what_is_empty_has_no_heading(plain):
    text = plain(account_text(dataclasses.replace(ACCOUNT, unknown={}, by_module=())))
    assert "Without a rule" not in text
    assert "Modules that cost" not in text
