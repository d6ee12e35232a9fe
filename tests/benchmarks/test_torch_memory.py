"""torchtitan's rows as modules of ours: which are weighed, what is kept by hand, and two of them compared."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import meshwright as mw  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _torch_llama import Llama, Recipe, spread  # noqa: E402
from torch_memory import case_of, compared  # noqa: E402

ROW = {
    "id": "tt-001", "source": "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
    "model": "Llama-3.1-8B", "n_layers": "32", "d_model": "4096", "n_heads": "32", "n_kv_heads": "8",
    "d_ff": "14336", "vocab": "128256", "seq_len": "8192", "accelerator": "H100-96GB-HBM2e-SXM-500W",
    "n_devices": "8", "precision": "bf16", "fsdp": "8", "tp": "1", "pp": "1", "cp": "1",
    "micro_batch_per_device": "2", "act_ckpt": "selective", "peak_mem_gib_per_device": "82.4",
    "notes": "Table 1; eager",
}  # fmt: skip
LATER = {
    "id": "tt-032", "source": "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "accelerator": "H200-141GB-SXM", "n_devices": "64", "precision": "float8(linear)+bf16", "fsdp": "64",
    "peak_mem_gib_per_device": "46.97", "notes": "torch.compile + float8 fp8 all-gather",
}  # fmt: skip


def test_a_row_is_a_case_and_its_notes_say_what_was_compiled():
    case = case_of(ROW)
    assert (case.fleet, case.layout, case.checkpoint) == ("8xH100-96GB-HBM2e", "fsdp=8", "op")
    assert (case.compiled, case.compiled_loss) == (False, False)
    later = case_of(ROW | LATER)
    assert (later.fleet, later.compiled, later.compiled_loss) == ("64xH200", True, True)
    assert (case.expandable, later.expandable) == (True, False)
    assert case_of(ROW | {"tp": "8", "n_devices": "64"}).layout == "fsdp=8,tensor=8"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pp": "8"}, "several stages of a pipeline"),
        ({"cp": "4"}, "context parallelism"),
        ({"precision": "mxfp8"}, "products in mxfp8"),
        ({"act_ckpt": ""}, "which activations are kept"),
        ({"accelerator": "TPU v5p"}, "neither the chip nor"),
    ],
)
def test_a_row_that_is_not_weighed_has_a_reason(changed, reason):
    assert case_of(ROW | changed).startswith(reason)


LAYERS, WIDTH, INNER, LENGTH = 3, 64, 160, 32


def saved_bytes(recipe):
    with torch.device("meta"):
        module = Llama(LAYERS, WIDTH, 4, 2, INNER, 512, LENGTH, recipe)
        tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    plan = partial(spread, recipe=recipe)
    weighing = mw.weigh(mw.torch_step(module, tokens, tokens, parallelize=plan), on="2xH100", layout="fsdp=2")
    return weighing.account.ranks[0].saved_activation_bytes


def test_each_recipe_keeps_what_it_keeps_by_hand():
    tokens = 2 * LENGTH
    none = saved_bytes(Recipe(checkpoint="full"))
    kept = saved_bytes(Recipe(checkpoint="op"))
    # Query, value, gate and down in bf16; attention's result, its sums in fp32 for each of 4 heads.
    block = tokens * (2 * (WIDTH + WIDTH // 2 + INNER + WIDTH + WIDTH) + 4 * 4)
    assert kept - none == pytest.approx(LAYERS * block, rel=0.02)  # and the state of random numbers
    compiled = saved_bytes(Recipe(checkpoint="op", compiled=True))
    assert kept - compiled == LAYERS * tokens * 2 * WIDTH
    fused = saved_bytes(Recipe(checkpoint="op", compiled=True, compiled_loss=True))
    # Logits in bf16 and two numbers a row, instead of their logarithms in fp32 and one number.
    assert compiled - fused == pytest.approx(tokens * (512 * (4 - 2) - 8), abs=16)


@pytest.mark.long
@pytest.mark.parametrize("row", [ROW, ROW | LATER], ids=lambda row: row["id"])
def test_published_memory_is_found_within_a_tenth(row):
    (found,), others = compared([row], 1)
    assert not others
    assert abs(found["error"]) <= 0.1
    assert found["allocated_gib"] < found["reserved_gib"]
