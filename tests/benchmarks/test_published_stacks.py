"""The script that scores published runs: layouts, what a stack does otherwise, and blind errors."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import predict_published
from _published_blind import with_blind_errors
from _published_interval import ends_of
from _published_rows import InexpressibleError, express, express_measured
from _published_score import scored_again
from _published_stacks import otherwise, stack_of
from _published_table import rows_of
from predict_published import OLDER, scored_from, sorted_out
from test_published_rows import LLAMA

from meshwright.predict import machine_of

GPT = {
    **LLAMA,
    "id": "bloom-001",
    "model": "GPT 13B",
    "params_b": "",
    "n_layers": "40",
    "d_model": "5120",
    "n_heads": "32",
    "n_kv_heads": "32",
    "d_ff": "20480",
    "gated_mlp": "no",
    "vocab": "50257",
    "seq_len": "2048",
    "precision": "fp16 mixed",
    "sharding": "ZeRO-1",
    "fsdp": "",
    "tp": "2",
    "pp": "4",
    "micro_batch_per_device": "2",
    "global_batch_seqs": "256",
    "act_ckpt": "full",
    "attention_impl": "unfused",
}


def test_a_pipeline_has_stages_replicas_with_a_sharded_optimizer_and_chunks():
    found = express({**GPT, "vp": "2"})
    assert found.config.layout == "stage=4,data=8,tensor=2"
    assert (found.config.zero1, found.config.pipeline_chunks, found.config.precision) == (True, 2, "fp16")
    assert found.unfused
    assert found.heads == 32
    assert found.config.model.num_heads == 40, "heads of 160 have no fused kernel: compiled with those of 128"


def test_several_microbatches_are_gathered_and_reduced_once_under_zero1():
    row = {**LLAMA, "sharding": "ZeRO-1", "fsdp": "", "dp": "64", "global_batch_seqs": "128"}
    assert express(row).config.layout == "data=64"
    assert express(row).config.zero1


def test_flops_a_second_give_the_seconds_by_the_convention_of_their_source():
    row = {**GPT, "id": "meg21-1", "tokens_per_s_per_device": "", "tflops_per_device": "140"}
    row |= {"n_heads": "40", "n_kv_heads": "40"}
    blocks, head = 40 * (24 * 5120**2 + 4 * 2048 * 5120), 6 * 5120 * 50304
    by_hand = 256 * 2048 * (4 * blocks + head) / (140e12 * 64)
    assert express_measured(row).measured_seconds == pytest.approx(by_hand)


def test_of_one_configuration_the_newest_row_counts(tmp_path):
    header = ["id", "date", *(key for key in LLAMA if key != "id")]
    lines = [",".join(header)]
    for number, date in ((1, "2025-01"), (2, "2026-01"), (3, "2025-06")):
        row = {**LLAMA, "id": f"a-{number}", "date": date, "tokens_per_s_per_device": str(2900 + number)}
        lines.append(",".join(row[key] for key in header))
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    expressed, others = sorted_out(path)
    assert [row.id for row in expressed] == ["a-2"]
    assert sorted(others[OLDER]) == ["a-1", "a-3"]


def test_runs_come_from_toml_and_from_vtrains_columns(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text('[[run]]\nid = "mine-1"\nn_layers = 32\n')
    assert rows_of(toml) == [{"id": "mine-1", "n_layers": "32"}]
    table = tmp_path / "vtrain_single.csv"
    table.write_text(
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
        "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
        "8,32,4,1024,16,24,1024,2,2,2,219.7\n"
    )
    found = express_measured(rows_of(table)[0])
    assert found.config.layout == "stage=2,data=2,tensor=2"
    assert found.measured_seconds == pytest.approx(0.2197)
    assert found.config.remat == "full"


def added(row, whole: dict[str, float] | None = None, **exposed: float) -> dict[str, float]:
    found = express(row)
    return otherwise(
        found.stack,
        config=found.config,
        heads=found.heads,
        unfused=found.unfused,
        owners=found.owners,
        machine=machine_of(found.fleet, None),
        step_seconds=sum(exposed.values()),
        exposed_seconds=exposed,
        whole_seconds=whole,
    )


def test_nothing_is_added_for_a_stack_that_does_nothing_otherwise():
    assert added(LLAMA, matmul=2.0, attention=1.0) == {}


def test_attention_in_parts_moves_its_scores_and_replaces_the_fused_kernel():
    found, more = (added({**GPT, "n_heads": heads}, matmul=9.0) for heads in ("32", "64"))
    # 32 heads more: 10 layers of a stage, 16 + 3 ticks, 13 + 9.5 passes over 2 x 32 / 2 x 2048^2 scores of
    # 2 bytes. Products of narrower heads are a little slower as well.
    moved = 10 * 19 * 22.5 * 2 * (2 * 32 / 2) * 2048**2
    per_second = 2039e9 * 0.85
    least = moved / per_second
    assert least < more["attention in parts"] - found["attention in parts"] < 1.35 * least
    fused = added(GPT, matmul=9.0, attention=1.5)
    assert found["attention in parts"] - fused["attention in parts"] == pytest.approx(1.5)


def test_the_head_stands_in_the_last_stage_and_there_is_one_only_in_a_pipeline():
    assert added(GPT, matmul=9.0)["head in the last stage"] > 0
    assert "head in the last stage" not in added({**GPT, "pp": "1"}, matmul=9.0)


def test_of_the_head_only_the_tied_tables_are_sent_between_the_first_and_the_last_stage():
    ours = {"all-reduce[stage]": 3.0, "all-gather[stage]": 2.0, "collective-permute[stage]": 1.0}
    found = added(GPT, matmul=9.0, **ours)["sums of tied tables"] + 5.0
    # half of 50,304 x 5120 numbers of 2 bytes, each way once, over the link of one device
    assert found == pytest.approx(2 * 50304 * 5120 / 2 / (0.85 * 1.5e9))
    assert added({**GPT, "params_b": "13.11"}, matmul=9.0, **ours)["sums of tied tables"] == pytest.approx(
        -5.0
    )


def test_a_source_of_two_stacks_names_them_beside_its_models():
    row = {**GPT, "id": "dlperf-1", "n_heads": "40", "n_kv_heads": "40"}
    megatron = added({**row, "model": "GPT (Megatron-LM)"}, matmul=9.0)["attention in parts"]
    oneflow = added({**row, "model": "GPT (OneFlow-GPT)"}, matmul=9.0)["attention in parts"]
    # softmax and dropout in one kernel: 4 of 22.5 passes less, over 2 x 40 / 2 x 2048^2 scores of 2 bytes
    less = 10 * 19 * 4 * 2 * (2 * 40 / 2) * 2048**2
    assert megatron - oneflow == pytest.approx(less / (2039e9 * 0.85))


def test_megatron_reduces_gradients_after_the_backward_pass_and_both_stacks_keep_norms_whole():
    row = {**GPT, "id": "dlperf-1", "n_heads": "40", "n_kv_heads": "40"}
    parts = {"matmul": 9.0, "all-reduce[data]": 1.0, "all-gather[tensor]": 0.5}
    megatron, oneflow = (
        added({**row, "model": model}, whole={"all-reduce[data]": 3.0}, **parts)
        for model in ("GPT (Megatron-LM)", "GPT (OneFlow-GPT)")
    )
    assert megatron["reductions after the backward pass"] == pytest.approx(2.0)
    assert "reductions after the backward pass" not in oneflow
    assert oneflow["reductions over tensor"] == megatron["reductions over tensor"] > -0.5
    # A record from before has no whole seconds: nothing is known to be hidden.
    assert "reductions after the backward pass" not in added({**row, "model": "GPT (Megatron-LM)"}, **parts)


def test_runs_in_fp16_reduce_half_of_what_sums_in_fp32_would():
    why, parts, whole = (
        "reductions in fp16",
        {"matmul": 9.0, "all-reduce[data]": 1.0},
        {"all-reduce[data]": 3.0},
    )
    assert added(GPT, **parts)[why] == pytest.approx(-0.5)
    assert added(GPT, whole=whole, **parts)[why] == pytest.approx(-1.5), (
        "what our program hides is halved too"
    )
    assert why not in added({**GPT, "precision": "bf16"}, **parts)
    alone = {**GPT, "pp": "1", "global_batch_seqs": "64"}
    assert express(alone).config.batch.sequences == 2 * 32, "a microbatch for each of 32 replicas: no sum"
    assert why not in added(alone, **parts)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"accelerator": "B200 (power limited)"}, "power limit"),
        ({"n_heads": "20", "d_model": "5000"}, "multiple of 8"),
    ],
)
def test_what_has_no_known_rate_is_refused(fields, words):
    with pytest.raises(InexpressibleError, match=words):
        express({**GPT, **fields})


def test_reductions_over_tensor_hide_behind_nothing_and_cross_the_network_where_the_axis_does():
    found = added(GPT, matmul=9.0, **{"all-gather[tensor]": 1.0})["reductions over tensor"] + 1.0
    # 6 all-reduces of 2 x 2048 x 5120 numbers of 2 bytes between two devices, 10 layers, 16 + 3 passes.
    fastest = 6 * 10 * 19 * 2 * 2 * 2048 * 5120 / 300e9
    assert fastest < found < 2 * fastest
    wide = {**GPT, "tp": "16", "pp": "1", "n_devices": "16", "devices_per_node": "8"}
    slow = added(wide, matmul=9.0)["reductions over tensor"]
    # 128 microbatches, 40 layers; between two nodes the array is sent once, by eight links of the network.
    assert slow == pytest.approx(6 * 40 * 128 * 2 * 2 * 2048 * 5120 / (8 * 0.85 * 1.5e9), rel=0.01)


def test_reductions_over_tensor_take_the_link_of_their_pair():
    row = {**GPT, "accelerator": "V100-32GB-SXM2", "devices_per_node": "8", "id": "bloom-002"}
    found = added(row, matmul=9.0)["reductions over tensor"]
    # one NVLink of 25 GB/s joins the first pair of a host of eight
    fastest = 6 * 10 * 19 * 2 * 2 * 2048 * 5120 / 25e9
    assert fastest < found < 2 * fastest


def test_transformer_engines_kernels_move_what_its_source_says_in_16_bits_and_in_8():
    row = {**LLAMA, "id": "mbridge-1", "precision": "FP8", "accelerator": "H100-80GB-SXM"}
    narrow, wide = (
        added({**row, "precision": each}, matmul=2.0, **{"memory-bound": 9.0})["fused kernels"] + 9.0
        for each in ("FP8", "bf16")
    )
    # 32 layers, a token of 4096, keys of 1024, an MLP of 14336; the head and AdamW are the rest. In 8 bits
    # attention's output and two gradients are cast besides: read in 16 bits, and written twice.
    tokens = 8192 * int(row["global_batch_seqs"]) / int(row["n_devices"])
    repeats = 4 / 3 if row["act_ckpt"] == "full" else 1
    per_byte = repeats * 32 * tokens / (3350e9 * 0.85)
    layers = per_byte * (60 * 4096 + 16 * 1024 + 16 * 14336)
    assert layers < wide < 1.6 * layers
    assert narrow - wide == pytest.approx(per_byte * 12 * 4096)


def test_attention_inside_packed_documents_takes_a_share_of_that_of_whole_windows():
    """200 of 4,096 positions are a twentieth of the scores, at a rate that short documents do not reach."""
    row = {**LLAMA, "id": "dgxcnemo-1", "accelerator": "H100-80GB-SXM", "seq_len": "4096"}
    row |= {"tokens_per_s_per_device": "9000"}
    assert "attention inside documents" not in added(row, attention=1.0)
    left = 1 + added({**row, "model": "Llama 3 8B SFT"}, attention=1.0)["attention inside documents"]
    assert 200 / 4096 < left < 0.5


def test_dropout_in_residual_sums_writes_and_reads_masks():
    row = {**GPT, "id": "dgxcnemo-1", "precision": "bf16", "attention_impl": "TE", "n_heads": "40"}
    row |= {"n_kv_heads": "40"}
    dropped, plain = (
        added({**row, "model": model}, matmul=9.0)["fused kernels"] for model in ("GPT-3 13B", "GPT 13B")
    )
    # 10 layers of a stage, 16 + 3 ticks of 2 x 2048 tokens; full recomputation repeats a third
    moved = 4 / 3 * 10 * 19 * 2 * 2048 * 12 * 5120 / 2
    assert dropped - plain == pytest.approx(moved / (2039e9 * 0.85))


TENSOR = {**LLAMA, "id": "mbridge-1", "sharding": "DDP", "fsdp": "", "accelerator": "H100-80GB-SXM"}
TENSOR |= {"dp": "8", "tp": "8"}


def test_products_over_tensor_run_in_pieces_beside_their_messages():
    """Pieces cost more than whole products, and less than products with every message waited for."""
    why = "products over tensor in pieces"
    ours = {"all-gather[tensor]": 1.0, "reduce-scatter[tensor]": 1.0}
    alone = added(TENSOR, matmul=4.0)[why]
    assert added(TENSOR, matmul=4.0, **ours)[why] == pytest.approx(alone - 2.0), "our own waiting is replaced"
    # 32 layers, 8 microbatches: 6 gathers and 4 scatters of 7/8 of 8192 x 4096 numbers of 2 bytes, 335 GB/s
    messages = 32 * 8 * 10 * 7 / 8 * 8192 * 4096 * 2 / 335e9
    assert 0 < alone < messages
    assert why not in added({**TENSOR, "id": "mosaic-1"}, matmul=4.0), "its source runs no products in pieces"
    assert why not in added({**TENSOR, "tp": "1", "dp": "", "sharding": "FSDP2"}, matmul=4.0)


def test_products_of_some_software_are_slower_where_the_chips_own_rate_is_known():
    row = {**LLAMA, "accelerator": "H100-80GB-SXM"}
    found = added({**row, "id": "mosaic-1"}, matmul=4.0)
    assert found == {"slower products": pytest.approx(4 * (1 / 0.88 - 1))}
    assert added({**row, "id": "mosaic-1", "precision": "FP8"}, matmul=4.0) == {}
    assert added({**row, "id": "mosaic-1", "accelerator": "B200-180GB"}, matmul=4.0) == {}
    eight_bits = added({**row, "id": "jaxtb-1", "precision": "FP8"}, matmul=4.0)
    assert eight_bits == {"slower products": pytest.approx(4 * (1 / 0.8 - 1))}


def test_a_row_that_names_no_kernel_has_that_of_its_stack():
    kernels = {
        (source, words): express({**LLAMA, "id": f"{source}-1", "attention_impl": words}).attention_kernel
        for source in ("mcore", "mosaic")
        for words in ("", "flash")
    }
    assert kernels == {
        ("mcore", ""): "cudnn",
        ("mcore", "flash"): "flash-2",
        ("mosaic", ""): "flash-2",
        ("mosaic", "flash"): "flash-2",
    }


def test_a_whole_batch_is_no_microbatch_of_a_pipeline():
    row = {**LLAMA, "id": "tt-1", "sharding": "FSDP2", "fsdp": "16", "pp": "4"}
    row |= {"micro_batch_per_device": "4", "global_batch_seqs": "64"}
    with pytest.raises(InexpressibleError, match="micro batch not stated"):
        express(row)
    assert express({**row, "id": "mcore-1"}).config.batch.microbatch_sequences == 4


def test_messages_between_stages_hide_where_a_stage_has_several_chunks():
    row = {**LLAMA, "id": "mbridge-1", "sharding": "DDP", "fsdp": "", "dp": "16", "pp": "4"}
    row |= {"micro_batch_per_device": "1", "global_batch_seqs": "64"}
    exposed = {"matmul": 10.0, "collective-permute[stage]": 1.0}
    assert "messages beside products" not in added(row, **exposed)
    assert added({**row, "vp": "2"}, **exposed)["messages beside products"] == pytest.approx(-1.0)


def test_a_step_takes_no_less_than_its_launches():
    small = {**GPT, "n_layers": "8", "d_model": "256", "d_ff": "1024", "n_heads": "4", "n_kv_heads": "4"}
    small |= {
        "pp": "1",
        "tp": "1",
        "micro_batch_per_device": "1",
        "global_batch_seqs": "16",
        "seq_len": "128",
    }
    row = {**small, "n_devices": "1"}
    found = added(row, matmul=0.02)
    assert 0.02 + sum(found.values()) == pytest.approx(8 * 16 * 3.6e-3)


def test_reductions_hide_under_the_last_microbatchs_backward_pass():
    row = {**LLAMA, "id": "mosaic-1", "sharding": "HSDP", "fsdp": "8", "dp": "8"}
    assert stack_of("mosaic").hidden_reduction
    exposed = {"matmul": 2.0, "all-reduce[data]": 0.5, "reduce-scatter[fsdp]": 0.25}
    assert added(row, **exposed)["reductions under the backward pass"] == -0.5
    exposed["all-reduce[data]"] = 4.0  # of the 2.25 seconds of all else, two thirds are 1.5
    assert added(row, **exposed)["reductions under the backward pass"] == pytest.approx(-1.5)


INTERNLM = {
    **LLAMA,
    "id": "internevo-1",
    "params_b": "",
    "n_kv_heads": "32",
    "d_ff": "11008",
    "vocab": "103168",
    "accelerator": "A100-80GB-SXM",
    "fsdp": "",
    "micro_batch_per_device": "2",
    "act_ckpt": "none",
}


@pytest.mark.parametrize(
    ("replicas", "tensor", "sharding", "between", "broadcasts"),
    [
        (512, 1, "ZeRO-1 over all DP", True, 9 * 32 + 3),  # more ranks than arrays
        (64, 1, "ZeRO-1 over all DP", True, 64),
        (128, 2, "ZeRO-1 over all DP", True, 128),
        (512, 1, "ZeRO-1 within 8 GPUs", False, 8),
    ],
)
def test_each_rank_that_owns_weights_broadcasts_them_around_the_ring(
    replicas, tensor, sharding, between, broadcasts
):
    row = {**INTERNLM, "n_devices": str(replicas * tensor), "tp": str(tensor), "sharding": sharding}
    row |= {"dp": str(replicas), "global_batch_seqs": str(8 * replicas)}
    found = added(row, matmul=3.0, **{"all-gather[data]": 0.3})["broadcasts of weights"] + 0.3
    num_bytes = 2 * (2 * 103168 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008))
    if between:  # eight links of 4 x 100 Gbit/s; each of the broadcasts passes all ranks
        by_hand = num_bytes / (8 * 0.85 * 6.25e9) + broadcasts * replicas * 14e-6
        assert found == pytest.approx(by_hand, rel=1e-3)
    else:
        assert num_bytes / 300e9 < found < 2 * num_bytes / 300e9


def test_elementwise_kernels_of_llm_c_move_what_its_source_says():
    row = {**LLAMA, "id": "llmc-1", "model": "GPT-2 124M", "params_b": "", "n_layers": "12", "d_model": "768"}
    row |= {"n_heads": "12", "n_kv_heads": "12", "d_ff": "3072", "gated_mlp": "no", "vocab": "50257"}
    row |= {"seq_len": "1024", "accelerator": "A100-80GB-SXM", "n_devices": "8", "dp": "8", "fsdp": ""}
    row |= {"sharding": "ZeRO-1", "micro_batch_per_device": "32", "global_batch_seqs": "512"}
    row |= {"act_ckpt": "none", "attention_impl": "cuDNN flash"}
    found = added(row, matmul=0.2, **{"memory-bound": 0.1})["kernels by hand"] + 0.1
    # Two microbatches. A layer moves 45 arrays of the width by token, of 2 bytes; logits three times.
    tokens, layers, logits = 32 * 1024, 12 * 90 * 768, 6 * 50304
    by_hand = 2 * tokens * (layers + logits + 22 * 768) / (2039e9 * 0.85)
    assert by_hand < found < 1.04 * by_hand, "the rest are gradients' sums and the update"
    fused = (
        added({**row, "model": "GPT-2 1558M"}, matmul=0.2, **{"memory-bound": 0.1})["kernels by hand"] + 0.1
    )
    assert found - fused == pytest.approx(2 * tokens * 12 * 2 * 3072 / (2039e9 * 0.85))


def test_a_record_is_scored_again_by_its_own_seconds():
    row = {**INTERNLM, "n_devices": "64", "dp": "64", "sharding": "ZeRO-1", "global_batch_seqs": "512"}
    found = express_measured(row)
    told = {
        "id": found.id,
        "layout": "data=64",
        "stack": "another",
        "predicted_seconds": 4.0,
        "low_seconds": 3.0,
        "high_seconds": 6.0,
        "exposed_seconds": {"matmul": 4.5, "all-gather[data]": 0.5},
        "otherwise_seconds": {"a reason that is no more": -1.0},
    }
    again = scored_again(found, told)
    assert again["stack"] == found.stack.name
    assert set(again["otherwise_seconds"]) == {"broadcasts of weights", "slower products"}
    expected = 5.0 + sum(again["otherwise_seconds"].values())
    assert again["predicted_seconds"] == pytest.approx(expected, rel=1e-4)
    low = ends_of(["a100"], 0.1)[0]
    assert again["low_seconds"] == pytest.approx(low * expected, rel=1e-4)
    assert again["error"] == pytest.approx(expected / found.measured_seconds - 1, abs=1e-4)
    assert "data=8,fsdp=8" in scored_again(found, {**told, "layout": "data=8,fsdp=8"})["failed"]
    assert scored_from([told], [found], 1) == [again]
    at = {"compiled_at": "0123456789ab"}
    assert scored_from([{**told, **at}], [found], 1) == [{**again, **at}]


def test_a_row_that_is_compiled_says_at_which_commit(monkeypatch):
    row = {**INTERNLM, "n_devices": "64", "dp": "64", "sharding": "ZeRO-1", "global_batch_seqs": "512"}
    found = express_measured(row)
    monkeypatch.setattr(predict_published, "commit", lambda: "0123456789ab")
    monkeypatch.setattr(
        predict_published, "scored_now", lambda rows, jobs: [{"id": each.id} for each in rows]
    )
    assert scored_from([], [found], 1) == [{"id": found.id, "compiled_at": "0123456789ab"}]


def test_a_source_has_no_part_in_its_own_blind_prediction():
    def row(source, software, measured):
        shared = {"predicted_seconds": 1.0, "measured_seconds": measured, "exposed_seconds": {"matmul": 0.8}}
        own = {"software": software, "products": 0.8} if software else {}
        return {"id": source, "source": source, "error": round(1 / measured - 1, 5)} | shared | own

    rows = [row("a", "eager", 1.0), row("b", "eager", 1.06), row("c", "alone", 1.5), row("d", "", 1.2)]
    blind = {each["source"]: each["blind_error"] for each in with_blind_errors(rows)}
    assert blind["a"] == pytest.approx(0.06, abs=2e-3)  # fitted to b
    assert blind["b"] == pytest.approx(1 / 1.06 - 1, abs=2e-3)
    # products took 0.8 s of our program, so 1.0 s at the share; without other rows they take 0.8 s
    assert blind["c"] == pytest.approx(0.8 / 1.5 - 1, abs=1e-3)
    assert blind["d"] == rows[3]["error"], "nothing was fitted to its software"
