"""Which steps the scaling benchmark weighs, and which published runs stand beside them."""

import sys
from pathlib import Path

import pytest

from meshwright.config import Layout, check_layout, load_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _scaling_points import (
    COPY_GPUS,
    MODES,
    NUM_GPUS,
    candidates,
    fastest,
    global_sequences,
    is_model,
    overrides,
    published,
)

ROW = {
    "id": "someone-001",
    "source": "someone's table",
    "model": "Llama-3.1-8B",
    "n_layers": "32",
    "d_model": "4096",
    "n_heads": "32",
    "n_kv_heads": "8",
    "d_ff": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "accelerator": "H100-80GB-SXM",
    "n_devices": "64",
    "precision": "bf16",
    "sharding": "FSDP2",
    "tp": "8",
    "pp": "",
    "global_batch_seqs": "96",
    "tokens_per_s_per_device": "4378",
    "notes": "",
}


@pytest.mark.parametrize("preset", COPY_GPUS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_gpus", NUM_GPUS)
def test_every_candidate_is_a_run_on_all_the_gpus(preset, mode, num_gpus):
    sequences = global_sequences(mode, num_gpus, load_config(preset).batch.sequences)
    groups = candidates(preset, num_gpus, sequences)
    assert groups
    for candidate in (each for group in groups for each in group):
        config = load_config(preset, overrides(preset, sequences, candidate))
        check_layout(config, Layout.parse(candidate.layout).resolve(num_gpus))
        assert config.batch.sequences == sequences


def test_strong_scaling_keeps_the_batch_and_weak_the_batch_of_a_gpu():
    assert [global_sequences("strong", num_gpus, 512) for num_gpus in (8, 4096)] == [512, 512]
    assert [global_sequences("weak", num_gpus, 512) for num_gpus in (8, 4096)] == [16, 8192]


def test_a_sequence_is_split_only_where_there_are_more_gpus_than_sequences():
    def told(num_gpus, sequences):
        groups = candidates("llama3-8b", num_gpus, sequences)
        return [[(each.layout, each.microbatch_sequences) for each in group] for group in groups]

    assert told(8, 512) == [[("fsdp=8", 2)], [("fsdp=8", 1)]]
    assert told(64, 128) == [[("fsdp=64", 2)], [("fsdp=64", 1)]]
    assert told(512, 1024) == [
        [("fsdp=512", 2), ("data=64,fsdp=8", 2)],
        [("fsdp=512", 1), ("data=64,fsdp=8", 1)],
    ]
    assert told(1024, 512) == [[("fsdp=512,tensor=2", 1), ("data=128,fsdp=4,tensor=2", 1)]]
    assert told(4096, 512) == [[("fsdp=512,tensor=8", 1), ("data=512,tensor=8", 1)]]
    assert told(16384, 512) == []


def test_the_fastest_that_fits_is_taken():
    rows = [
        {"fits": False, "step_seconds": 1.0},
        {"fits": True, "step_seconds": 3.0},
        {"fits": True, "step_seconds": 2.0},
    ]
    assert fastest(rows) is rows[2]
    assert fastest(rows[:1]) is None


def test_a_published_run_is_known_by_its_dimensions():
    config = load_config("llama3-8b")
    assert is_model(ROW, config)
    assert is_model({**ROW, "model": "somebody's own name"}, config)
    assert not is_model({**ROW, "model": "Llama3 8B LoRA"}, config)
    assert not is_model({**ROW, "notes": "container 26.06; SFT"}, config)
    assert not is_model({**ROW, "seq_len": "32768"}, config)
    assert not is_model(ROW, load_config("llama3-70b"))


def test_published_runs_are_shown_by_gpus_and_format_and_once():
    rows = [
        ROW,
        {**ROW, "id": "again-001"},
        {**ROW, "id": "fp8", "precision": "float8(linear)+bf16", "tokens_per_s_per_device": "5570.1"},
        {**ROW, "id": "slow", "accelerator": "H100-96GB-HBM2e-SXM-500W", "n_devices": "128"},
        {**ROW, "id": "small", "n_devices": "8", "tokens_per_s_per_device": "5762"},
        {**ROW, "id": "no rate", "tokens_per_s_per_device": ""},
        {**ROW, "id": "another chip", "accelerator": "A100-80GB-SXM"},
    ]
    found = published(rows, load_config("llama3-8b"))
    assert [(each["id"], each["num_gpus"], each["kind"]) for each in found] == [
        ("small", 8, "bf16"),
        ("fp8", 64, "8-bit"),
        ("someone-001", 64, "bf16"),
        ("slow", 128, "bf16, cards of 500 W"),
    ]
    assert (found[2]["tensor"], found[2]["stage"], found[2]["global_sequences"]) == (8, 1, 96)
