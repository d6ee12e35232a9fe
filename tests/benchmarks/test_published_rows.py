"""The script that scores published runs: which rows are runs of ours."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _published_rows import InexpressibleError, chip_of, express, express_measured
from _published_score import print_table, spread, summary_of
from _published_stacks import stack_of_experts
from predict_published import MOST_OF_ONE_SOURCE, drawn, record_name

from tests.benchmarks.rows import LLAMA


def test_a_row_becomes_the_run_that_it_states():
    found = express_measured(LLAMA)
    assert found.config.model.num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert not found.config.model.tied_embeddings
    assert found.config.layout == "fsdp=64"
    assert found.config.remat == "alternate-dots"
    assert found.fleet.name == "64xA100-80GB"
    assert found.measured_seconds == pytest.approx(8192 / 2973)
    assert found.standard


def test_a_source_may_have_a_network_of_its_own():
    assert express({**LLAMA, "id": "internevo-1"}).fleet.chip.between.bytes_per_second == 6.25e9
    assert express(LLAMA).fleet.chip.between.bytes_per_second == 25e9


@pytest.mark.parametrize(
    ("chip", "width", "heads", "head_dim"),
    [
        ("H100-80GB-SXM", 192, 16, 192),
        ("H100-80GB-SXM", 256, 12, 256),
        ("GB200-186GB", 192, 32, 96),
        ("A100-80GB-SXM", 256, 24, 128),
    ],
)
def test_heads_above_128_are_whole_on_hopper_and_several_elsewhere(chip, width, heads, head_dim):
    row = {**LLAMA, "accelerator": chip, "d_model": "3072", "params_b": "", "devices_per_node": "4"}
    row |= {"n_heads": str(3072 // width), "n_kv_heads": "4"}
    model = express(row).config.model
    assert (model.num_heads, model.head_dim) == (heads, head_dim)
    assert model.num_kv_heads * model.head_dim == 4 * width
    with pytest.raises(InexpressibleError, match="beyond our fused kernel"):
        express({**row, "d_model": "4352", "n_heads": "8", "n_kv_heads": "8"})


@pytest.mark.parametrize(
    ("notes", "window", "every"),
    [
        ("sliding window of 1024, 3:1", 1024, 4),
        ("alternating sliding-window 128 attention", 128, 2),
        ("window size 4096 in every layer", 4096, None),
    ],
)
def test_a_stated_window_is_the_runs(notes, window, every):
    model = express({**LLAMA, "notes": notes}).config.model
    assert (model.window, model.global_every) == (window, every)


def test_stated_adapters_are_the_runs():
    row = {**LLAMA, "model": "Llama-3-8B QLoRA", "sharding": "ZeRO-1", "fsdp": "", "dp": "64"}
    row |= {"notes": "rank 16, q_proj and v_proj", "precision": "bf16 weights"}
    run = express(row).config
    assert (run.lora.rank, run.lora.targets, run.lora.base) == (16, ("q_proj", "v_proj"), "nf4")
    assert (run.layout, run.zero1) == ("data=64", False), "what is sharded is the few adapters' state"


def test_a_state_in_bf16_is_the_runs():
    state = express({**LLAMA, "precision": "bf16 (pure)"}).config.state
    assert (state.parameters, state.moments, state.rounding) == ("bf16", "bf16", "nearest")


@pytest.mark.parametrize(
    ("change", "fleet", "layout"),
    [
        ({"notes": "2 slice(s) of v5e-32", "dp": "2", "fsdp": "32"}, "2xv5e-32", "data=2,fsdp=32"),
        (
            {"notes": "2x v5e-32", "dp": "2", "fsdp": "", "sharding": "FSDP, DP over DCN"},
            "2xv5e-32",
            "data=2,fsdp=32",
        ),
        ({"notes": "", "dp": "4", "fsdp": "16", "sharding": "FSDP (+DP)"}, "4xv5e-16", "data=4,fsdp=16"),
        ({"notes": "2 slices, fsdp over both", "dp": "", "fsdp": "64"}, "2xv5e-32", "fsdp=64"),
        ({"notes": "1 slice(s) of v5e-64", "dp": "1", "fsdp": "64"}, "v5e-64", "fsdp=64"),
    ],
)
def test_a_row_on_several_slices_is_a_fleet_of_them(change, fleet, layout):
    row = {**LLAMA, "accelerator": "TPU v5e (16GB)", "n_devices": "64", "id": "maxtext-002", **change}
    expressed = express(row)
    assert (expressed.fleet.name, expressed.config.layout) == (fleet, layout)


def test_one_gather_and_one_reduction_become_fsdp_inside_nodes():
    row = {**LLAMA, "sharding": "ZeRO-1", "fsdp": "", "dp": "64"}
    assert express(row).config.layout == "data=8,fsdp=8"


def test_what_is_not_stated_or_not_stock_is_no_standard_row():
    assert not express({**LLAMA, "act_ckpt": ""}).standard
    assert not express({**LLAMA, "accelerator": "H100-96GB-HBM2e-SXM-500W"}).standard


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ep": "2"}, "experts of a model that is not known by its name"),
        ({"moe": "64/8", "model": "Qwen3_30B_a3B"}, "dimensions other than those of the model that it names"),
        ({"ep": "8", "model": "Nemotron_3_Super"}, "experts between projections to a narrower width"),
        ({"id": "bloom-001", "notes": "row dated 02-23 2022"}, "machine was changed afterwards"),
        ({"moe": "8 experts"}, "experts of a model that is not known by its name"),
        ({"precision": "nvfp4"}, "4-bit or integer arithmetic"),
        ({"precision": "fp16/bf16"}, "precision not stated"),
        ({"attention_impl": "unfused"}, "attention without a fused kernel, in a stack of which no model"),
        ({"sharding": ""}, "layout not stated"),
        ({"global_batch_seqs": ""}, "global batch not stated"),
        ({"global_batch_seqs": "96"}, "does not divide over its replicas"),
        ({"seq_len": "long"}, "seq_len is no number"),
        ({"params_b": "70"}, "do not give the stated number of parameters"),
        ({"accelerator": "Abacus"}, "the catalog has no chip 'Abacus'"),
        ({"accelerator": "TPU v3-32 (16GB/core)"}, "the catalog has no chip 'TPU v3-32'"),
        ({"accelerator": "TPU v5e (16GB)", "n_devices": "24"}, "no TPU slice of that size"),
        ({"accelerator": "TPU v5e (16GB)", "notes": "3 slice(s) of v5e-256"}, "no whole slices"),
        ({"accelerator": "V100-32GB-SXM2"}, "the chip has no bf16"),
        ({"n_devices": "8", "fsdp": "", "sharding": "DDP"}, "state does not fit"),
        ({"sharding": "DDP", "global_batch_seqs": "128", "params_b": ""}, "state does not fit"),
        ({"n_kv_heads": "5"}, "our configuration refuses it"),
        ({"act_ckpt": "selective (norm, MLA up-proj)"}, "rematerialisation of its own kind"),
        ({"notes": "sliding-window 5:1 attention"}, "attention with a window that is not stated"),
        ({"model": "Llama-3-8B LoRA"}, "LoRA whose rank is not stated"),
        ({"model": "Llama-3-8B LoRA", "notes": "rank 16"}, "LoRA whose products are not stated"),
        (
            {"optimizer": "AdamW (adapters)", "notes": "r=16 all-linear", "pp": "2", "fsdp": "32"},
            "LoRA in a pipeline",
        ),
        ({"act_ckpt": "custom: q k v norm on device"}, "rematerialisation of its own kind"),
        ({"act_ckpt": "save_everything"}, "rematerialisation of its own kind"),
    ],
)
def test_other_rows_say_why_they_are_no_runs_of_ours(change, reason):
    with pytest.raises(InexpressibleError, match=reason):
        express({**LLAMA, **change})


QWEN = {
    **LLAMA,
    "id": "mbridge-900",
    "date": "2026-04",
    "model": "Qwen3_30B_a3B",
    "params_b": "30.5",
    "n_layers": "48",
    "d_model": "2048",
    "n_kv_heads": "4",
    "d_ff": "768",
    "vocab": "151936",
    "seq_len": "4096",
    "moe": "128/8",
    "accelerator": "H100-80GB-SXM",
    "n_devices": "32",
    "precision": "FP8",
    "sharding": "DDP+distributed-optimizer(ZeRO-1)",
    "fsdp": "",
    "dp": "32",
    "ep": "16",
    "global_batch_seqs": "128",
    "act_ckpt": "",
}


def test_a_row_of_experts_is_the_model_that_it_names_with_balanced_experts():
    run = express(QWEN)
    model = run.config.model
    assert (model.num_experts, model.experts_per_token, model.capacity_factor) == (128, 8, 1.0)
    assert model.qk_norm == "head", "which no column tells"
    assert (run.config.layout, run.experts) == ("data=2,expert=16", "experts across domains, fp8")
    piped = express({**QWEN, "pp": "2", "ep": "8", "dp": "16", "precision": "BF16"})
    assert (piped.config.layout, piped.experts) == (
        "stage=2,data=2,expert=8",
        "experts in one domain, stages, bf16",
    )


def test_fsdp_over_experts_devices_has_their_axis_for_the_experts():
    row = {**QWEN, "sharding": "FSDP2", "fsdp": "32", "dp": ""}
    assert express(row).config.layout == "fsdp=2,expert=16"
    with pytest.raises(InexpressibleError, match="experts over devices of tensor parallelism"):
        express({**QWEN, "id": "someone-001", "tp": "4", "dp": "8"})
    with pytest.raises(InexpressibleError, match="experts over devices of tensor parallelism"):
        express({**QWEN, "tp": "32", "dp": "1"})


def test_whole_experts_over_tensor_leave_the_other_devices_to_their_axis():
    run = express({**QWEN, "tp": "4", "dp": "8"})
    assert (run.config.layout, run.config.fold_experts) == ("data=2,expert=4,tensor=4", "tensor")
    assert run.experts == "experts across domains, fp8"
    assert "whole experts over the devices of tensor parallelism too" in run.notes
    assert express(QWEN).config.fold_experts == "none"


def test_a_hybrid_of_experts_needs_no_dimensions_in_its_columns():
    blank = dict.fromkeys(("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "moe"), "")
    row = {**QWEN, **blank, "model": "Nemotron_3_Nano", "ep": "8", "date": "2026-04"}
    found = express({**row, "accelerator": "B200-180GB"})
    model = found.config.model
    # 23 layers of Mamba-2, 6 of attention, experts after 23 of these 29; NVIDIA's card says 31.6B.
    assert [model.count(mixer=mixer) for mixer in ("mamba", "attention")] == [23, 6]
    assert model.num_parameters == pytest.approx(31.6e9, rel=2e-3)
    assert (found.heads, found.config.remat) == (32, "dots-attention")
    assert found.experts == "experts in one domain, hybrid, fp8"
    assert (found.stack.graphs, found.stack.sends_once) == ("attention", True)
    assert express(row).config.remat == "full", "which the recipe for H100 comes nearest to"


def test_a_predicted_token_is_a_layer_more():
    row = {**QWEN, "model": "DeepSeekV3", "params_b": "671", "n_layers": "61", "d_model": "7168"}
    row |= {"n_heads": "128", "n_kv_heads": "", "d_ff": "2048", "vocab": "129280", "moe": "256/8"}
    row |= {"accelerator": "GB300-279GB", "n_devices": "64", "dp": "64", "devices_per_node": "4", "ep": "64"}
    assert express(row).config.model.num_layers == 62
    assert express({**row, "model": "DeepSeekV3 (w/o MTP)"}).config.model.num_layers == 61
    piped = {**row, "pp": "2", "ep": "32", "dp": "32"}
    found = express(piped)
    assert (found.config.model.num_layers, found.config.model.num_dense_layers) == (62, 3)
    in_chunks = express({**piped, "vp": "8"})
    assert (in_chunks.config.model.num_layers, in_chunks.config.pipeline_chunks) == (64, 8)
    assert in_chunks.config.model.num_dense_layers == 0
    assert "its dense first layers taken as layers of experts" in " ".join(in_chunks.notes)


@pytest.mark.parametrize(
    ("change", "graphs", "once", "overlaps"),
    [
        ({}, "", True, False),
        ({"date": "2025-09"}, "", False, True),
        ({"accelerator": "GB200-186GB", "devices_per_node": "4"}, "router", True, False),
        (
            {"accelerator": "GB200-186GB", "devices_per_node": "4", "date": "2026-06", "precision": "MXFP8"},
            "whole",
            True,
            True,
        ),
        ({"id": "automodel-900"}, "", True, False),
    ],
)
def test_a_release_says_how_experts_are_run(change, graphs, once, overlaps):
    stack = express({**QWEN, **change}).stack
    assert (stack.graphs, stack.sends_once, stack.overlaps_experts) == (graphs, once, overlaps)
    assert stack.groups_products


@pytest.mark.parametrize(
    ("model", "change", "repeats"),
    [
        ("DeepSeekV3", {}, ("latents",)),
        ("DeepSeekV3", {"precision": "BF16"}, ("activation",)),
        ("DeepSeekV3", {"date": "2026-06"}, ()),
        ("DeepSeekV3", {"date": "2025-09"}, ()),
        ("GPT OSS 120B", {"precision": "BF16"}, ()),
        ("GPT OSS 120B", {"precision": "BF16", "accelerator": "B200-180GB"}, ("norms", "activation")),
        ("Qwen3_30B_a3B", {}, ()),
    ],
)
def test_a_release_says_what_is_computed_again(model, change, repeats):
    row = {**QWEN, "model": model, "accelerator": "GB300-279GB", "date": "2026-04", **change}
    assert stack_of_experts(row, "mbridge").repeats == repeats


def test_a_row_is_a_run_without_its_measurement_and_has_an_error_only_with_it():
    blank = {**LLAMA, "tokens_per_s_per_device": ""}
    assert express(blank) == express(LLAMA)
    with pytest.raises(ValueError, match="someone-001: no measured column was read"):
        _ = express(LLAMA).measured_seconds
    with pytest.raises(InexpressibleError, match="neither step time nor tokens"):
        express_measured(blank)


@pytest.mark.parametrize(
    ("source", "words", "remat"),
    [
        ("someone", "none", "dots-attention"),
        ("someone", "selective", "dots"),
        ("tt", "selective", "alternate-dots"),
        ("tt", "selective(every 2nd layer)", "full-every-2"),
        ("maxtext", "minimal", "dots"),
        ("maxtext", "minimal_with_context", "dots-attention"),
        ("nnscaler", "full (per decoder layer)", "full"),
        ("someone", "save_qkv_proj", "save:query,key,value"),
        ("someone", "SAVE_QKV_OUT_PROJ", "save:query,key,value,out"),
        ("someone", "SAVE_ENCODED_AND_OUT_PROJ", "save:context,out"),
        ("someone", "save_dot_with_context_except_mlp", "save:query,key,value,context,out"),
        ("someone", "SAVE_DOT_ONLY", "dots"),
        ("someone", "custom: q k v qkv out mlpwo on device", "save:query,key,value,out,mlp_out"),
        ("someone", "custom: context mlpwi_0 mlpwi_1 on device", "save:context,mlp_gate,mlp_up"),
        ("someone", "custom: qkv recompute, layer input saved on device", "full"),
    ],
)
def test_a_policy_is_that_of_whoever_published_the_row(source, words, remat):
    assert express({**LLAMA, "id": f"{source}-001", "act_ckpt": words}).config.remat == remat


@pytest.mark.parametrize(
    ("source", "notes", "precision", "gradient_sum"),
    [
        ("someone", "", "bf16", "fp32"),
        ("tt", "", "bf16", "all-fp32"),
        ("mbridge", "", "fp8", "bf16"),
        ("someone", "FP8_PARAMS, grad_reduce_in_fp32=False", "fp8", "bf16"),
        ("tt", "", "fp16", "fp32"),
    ],
)
def test_gradients_are_summed_as_the_row_or_its_source_says(source, notes, precision, gradient_sum):
    row = {**LLAMA, "id": f"{source}-001", "notes": notes, "precision": precision}
    row["accelerator"] = "H100-80GB-SXM"
    assert express(row).config.gradient_sum == gradient_sum


def test_whose_attention_ran_is_what_the_row_says():
    assert express({**LLAMA, "attention_impl": "SDPA flash"}).attention_kernel == "flash-2"
    assert express({**LLAMA, "attention_impl": "cuDNN flash"}).attention_kernel == "cudnn"
    assert express({**LLAMA, "attention_impl": "TE fused attention"}).attention_kernel == "cudnn"


def test_words_in_parentheses_do_not_hide_a_chip():
    assert chip_of("H100-80GB-SXM (GCP A3, 8 GPUs/VM)").name == "H100"
    assert chip_of("B200 (power limited)").name == "B200"


def test_a_draw_is_spread_over_sources_and_repeats():
    rows = [express({**LLAMA, "id": f"{source}-{n:03}"}) for source in ("a", "b") for n in range(20)]
    few = [express({**LLAMA, "id": "c-1"})]
    ids = [row.id for row in drawn(rows + few, 33, 7)]
    assert ids == [row.id for row in drawn(rows + few, 33, 7)]
    assert [sum(i.startswith(s) for i in ids) for s in "abc"] == [MOST_OF_ONE_SOURCE, MOST_OF_ONE_SOURCE, 1]
    assert len(drawn(rows, 4, 7)) == 4


def test_the_summary_counts_signs_and_intervals():
    rows = [
        {"id": str(n), "source": "a", "chip": "H100", "scale": "to 8", "standard": n > 0, "sustained": True}
        | {"error": error, "holds": abs(error) < 0.2}
        for n, error in enumerate((-0.3, -0.1, 0.1))
    ]
    found = summary_of([*rows, {"id": "3", "failed": "no compiler"}])
    assert found["failed"] == {"3": "no compiler"}
    assert found["spread"]["all"]["rows"] == 3
    assert found["spread"]["all"]["bias"] == -0.1
    assert found["spread"]["standard"] == {**spread(rows[1:]), "kind": "kind not declared"}
    assert found["spread"]["all"]["holds"] == pytest.approx(2 / 3, abs=1e-4)


def test_where_kinds_differ_each_has_groups_of_its_own_and_the_printed_tables_say_which(capsys):
    shared = {"source": "a", "chip": "H100", "scale": "to 8", "standard": True, "sustained": True}
    shared |= {"num_devices": 8, "layout": "data=8", "remat": "full", "measured_seconds": 1.0}
    kinds = {"a-1": ("fitted", 0.1), "a-2": ("sealed", 0.3), "a-3": ("kind not declared", 0.5)}
    rows = [
        {**shared, "id": name, "kind": kind, "error": error, "predicted_seconds": 1 + error, "holds": True}
        for name, (kind, error) in kinds.items()
    ]
    found = summary_of(rows)
    assert found["kinds"] == {"sealed": 1, "fitted": 1, "kind not declared": 1}
    assert found["undeclared"] == ["a"]
    assert found["spread"]["chip H100, sealed"]["median"] == 0.3
    assert found["spread"]["chip H100, fitted"]["kind"] == "fitted"
    assert "chip H100" not in found["spread"], "no group but that of all rows mixes kinds"
    assert found["spread"]["all"]["kind"] == "1 sealed, 1 fitted, 1 kind not declared"
    print_table(rows, {}, found)
    printed = capsys.readouterr().out
    for name, (kind, _) in kinds.items():
        assert f"{name}  {kind} " in printed
    assert "kind not declared: a. Say in benchmarks/row_kinds.toml" in printed


MAXTEXT = {
    "id": "maxtext-900",
    "model": "MaxText-32B",
    "n_layers": "32",
    "d_model": "8192",
    "n_heads": "64",
    "n_kv_heads": "64",
    "d_ff": "28672",
    "gated_mlp": "yes",
    "vocab": "32000",
    "seq_len": "2048",
    "accelerator": "TPU v5e (16GB)",
    "n_devices": "256",
    "precision": "bf16 compute, fp32 weights",
    "sharding": "FSDP over ICI",
    "micro_batch_per_device": "4",
    "global_batch_seqs": "1024",
    "act_ckpt": "full",
    "tflops_per_device": "100",
}


def test_maxtexts_flops_count_products_and_the_whole_of_attention_three_times():
    row = express_measured(MAXTEXT)
    assert row.fleet.name == "v5e-256"
    block = 4 * 8192 * 8192 + 3 * 8192 * 28672  # MaxText's heads are 128 wide
    attention = 4 * 2048 * 8192 * 32
    each = 3 * (2 * (32 * block + 8192 * 32000) + attention)
    assert row.measured_seconds == pytest.approx(4 * 2048 * each / 100e12, rel=1e-3)


def test_a_script_beside_the_table_tells_a_rows_layout_and_its_batch_counts_every_device():
    row = express(
        {**MAXTEXT, "model": "MaxText-128B", "d_ff": "57344", "n_heads": "128", "n_kv_heads": "128"}
        | {"n_layers": "64", "accelerator": "TPU v5p (95GB)", "n_devices": "128", "tp": "1"}
        | {"micro_batch_per_device": "", "global_batch_seqs": "", "act_ckpt": ""}
    )
    assert row.fleet.name == "v5p-256"
    assert (row.config.layout, row.config.remat) == ("fsdp=16,tensor=8", "dots")
    assert (row.config.batch.sequences, row.config.batch.microbatch_sequences) == (128, 8)


def test_what_a_tpu_run_keeps_on_the_host_is_taken_as_the_inputs_of_its_blocks():
    row = express({**MAXTEXT, "act_ckpt": "qkv_proj_offloaded"})
    assert (row.config.remat, row.config.offload) == ("full", "activations")
    assert any("inputs on the host" in note for note in row.notes)


def test_a_record_of_one_toml_file_never_takes_the_place_of_that_of_the_published_rows():
    survey, own = Path("facts/published_runs.csv"), Path("benchmarks/simumax_b200.toml")
    assert record_name([survey, Path("facts/dgxc_runs.csv")], tpus=False) == "predict_published"
    assert record_name([own], tpus=False) == "predict_simumax_b200"
    assert record_name([survey, own], tpus=False) == "predict_published"
    assert record_name([survey], tpus=True) == "predict_tpus"
