"""Modules of four libraries on one device and on eight: each works, or says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from torch_modules import CASES, is_installed, weigh_both

# Of those that are refused: where, a part of the message, and of what to do next.
REFUSED = {
    "transformers.clip": ("fsdp_8", "logit_scale is a single number", "parallelize=f"),
    "diffusers.dit": ("fsdp_8", "it runs while its parameters are sharded", "call fully_shard on this part"),
    "torchvision.fasterrcnn": ("both", "depends on the data", "with that part replaced"),
}


# Large, and of a kind of which others are weighed in `make test-wide`.
LARGE = (
    *("diffusers.unet", "diffusers.unet_with_text"),
    *(f"transformers.{name}" for name in ("bart", "mamba", "swin", "whisper")),
)


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LARGE else pytest.mark.wide) for n in CASES]
)
def test_a_module_is_weighed_on_one_device_and_on_eight_or_refused_in_words(name):
    library = name.partition(".")[0]
    if not is_installed(library):
        pytest.skip(f"{library} is not installed")
    row = weigh_both(name)
    where, words, next_step = REFUSED.get(name, ("", "", ""))
    for place in ("one_device", "fsdp_8"):
        if place == where or where == "both":
            assert words in row[f"{place}_refused"]
            assert next_step in row[f"{place}_next"]
        else:
            assert f"{place}_refused" not in row, row[f"{place}_refused"]
            assert row[f"{place}_gib"] > 0
    if "fsdp_8_gib" in row and "one_device_gib" in row:
        # The fleet has two workspaces of cuBLAS, of 32 MiB each; figures are rounded.
        assert row["fsdp_8_gib"] <= row["one_device_gib"] + 2 * 32 / 1024 + 1e-4
        assert row["fsdp_8_parameters_bytes"] >= 4 * row["num_parameters"] // 8
