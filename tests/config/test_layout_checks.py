"""What does not divide, stages and their ticks, and chips without a precision's units."""

from fractions import Fraction

import pytest

from meshwright.config import (
    Layout,
    Ticks,
    check_layout,
    check_precision,
    check_slices,
    load_config,
    on_nearest_layout,
    overridden,
    resolve_batch,
    ticks_of,
)
from meshwright.errors import InputError
from meshwright.hardware import Fleet


@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("llama3-405b", "fsdp=64,tensor=8"),
        ("llama3-8b", "data=8,fsdp=64"),
        ("bytes-10m", "data=2,fsdp=2,tensor=2"),
        ("bytes-nano", "data=2,fsdp=2,tensor=2"),
        ("gpt2-1.5b", "fsdp=64"),
        ("bytes-nano", "data=2,context=2,tensor=2"),
        ("llama3-8b", "fsdp=8,context=8"),
        ("cruncher", "data=2,fsdp=2,tensor=2"),
        ("linear", "data=4,fsdp=2"),
        ("lenet", "data=2,fsdp=2,tensor=2"),
        ("lenet", "fsdp=32"),
        ("bytes-moe", "fsdp=2,expert=4,tensor=2"),
        ("mixtral-8x7b", "fsdp=8,expert=8"),
        ("mistral-7b-v0.3", "fsdp=4,context=2"),
        ("deepseek-v3", "fsdp=8,expert=8,tensor=8"),
        ("llama3-8b", "tensor=32"),  # four devices share each of eight key-value heads
        ("gpt2-124m", "fsdp=16,tensor=4"),  # four divides the columns of the table, not its 50,257 rows
    ],
)
def test_layouts_that_split_evenly_pass(preset: str, layout: str):
    check_layout(load_config(preset), Layout.parse(layout))


@pytest.mark.parametrize(
    ("preset", "layout", "message", "hint"),
    [
        ("bytes-nano", "data=3", "batch.sequences = 8 does not divide over data*fsdp = 3", "= 6 or 9"),
        ("bytes-nano", "data=3", "bytes-nano on layout data=3", "or data*fsdp = 2 or 4"),
        (
            "llama3-8b",
            "fsdp=4096",
            "batch.sequences = 512 does not divide over data*fsdp = 4096 x batch.microbatch_sequences = 1",
            "use batch.sequences = 4096, or data*fsdp = 512",
        ),
        ("llama3-70b", "fsdp=3", "model.embed_dim = 8192 does not divide over fsdp = 3", "fsdp=2 or 4"),
        ("llama3-8b", "tensor=64", "model.num_heads = 32 does not divide over tensor = 64", "tensor=32"),
        (
            "llama3-8b",
            "tensor=12",
            "model.num_kv_heads = 8 does not divide over tensor = 12",
            "use tensor=8, or model.num_kv_heads = 12",
        ),
        ("gpt2-124m", "tensor=5", "model.mlp_dim = 3072 does not divide over tensor = 5", "3070 or 3075"),
        (
            "gpt2-124m",
            "fsdp=128,tensor=4",
            "model.embed_dim = 768 does not divide over fsdp*tensor = 512, which split the columns of tables "
            "with model.vocab_size = 50257 rows",
            "use fsdp*tensor=384 or 768, or model.vocab_size = 50256 or 50260",
        ),
        (
            "gpt2-124m",
            "tensor=3",
            "batch.sequence_length = 1024 does not divide over tensor = 3",
            "1023 or 1026",
        ),
        ("cruncher", "tensor=3", "model.width = 64 does not divide over tensor = 3", "tensor=2 or 4"),
        ("cruncher", "fsdp=3", "model.width = 64 does not divide over fsdp = 3", "model.width = 63 or 66"),
        ("linear", "fsdp=3", "model.input_dim = 16 does not divide over fsdp = 3", "input_dim = 15 or 18"),
        ("lenet", "fsdp=64", "the inputs of the hidden layer = 800 does not divide", "use data=2,fsdp=32"),
        ("resnet18-fashion", "fsdp=3", "the inputs of the head = 512 does not divide", "use fsdp=2 or 4"),
        ("lenet", "tensor=3", "the hidden units = 128 does not divide over tensor = 3", "use tensor=2 or 4"),
        (
            "llama3-8b",
            "stage=64",
            "model.num_layers = 32 is less than stage = 64",
            "use stage=32 or less",
        ),
        (
            "cruncher",
            "stage=2,data=2",
            "model.kind = 'cruncher', but stage = 2 splits the layers of a transformer",
            "use data=4 in place of stage and data",
        ),
        (
            "llama3-8b",
            "fsdp=4,expert=2",
            "axis 'expert' splits experts, and the model has none",
            "use data=2",
        ),
        ("cruncher", "data=2,expert=2", "axis 'expert' splits experts", "use data=4 in place of both"),
        (
            "bytes-moe",
            "expert=3",
            "model.num_experts = 4 does not divide over expert = 3",
            "use expert=2 or 4",
        ),
        (
            "bytes-moe",
            "data=4,expert=4",
            "= 8 does not divide over data*fsdp*expert = 16",
            "or data*fsdp*expert = 8",
        ),
        (
            "gpt2-124m",
            "context=3",
            "batch.sequence_length = 1024 does not divide into 2 pieces for each of context = 3 devices",
            "use batch.sequence_length = 1020 or 1026, or context=2 or 4",
        ),
        (
            "bytes-nano",
            "context=5,tensor=4",
            "does not divide into 4 pieces for each of context = 5 devices",
            "or context=4 or 8",
        ),
        ("cruncher", "context=2", "model.kind = cruncher has no sequence for context = 2", "use context=1"),
        (
            "deepseek-v2-lite",
            "fsdp=4,context=2",
            "= 2: attention over context is not latent (model.latent_rank = 512)",
            "tensor=2 splits the heads instead",
        ),
        (
            "gemma-2-2b",
            "stage=16",
            "the most stages for whole groups of model.global_every = 2 layers = 13 is less than stage = 16",
            "use stage=13 or less",
        ),
        (
            "deepseek-v2-lite",
            "stage=32,fsdp=4",
            "model.num_layers - model.num_dense_layers = 26 is less than stage = 32",
            "use stage=26 or less",
        ),
        (
            "bytes-moe",
            "expert=4,fsdp=4",
            "batch.sequences = 8 does not divide over data*fsdp*expert = 16",
            "--layout expert=2,context=2,fsdp=4 --set fold_experts=context --set zero1=true",
        ),
        (
            "deepseek-v2-lite",
            "fsdp=1024",
            "model.latent_rank = 512 does not divide over fsdp = 1024",
            "use data=2,fsdp=512 in place of fsdp=1024",
        ),
    ],
)
def test_what_does_not_divide_is_named_with_both_sizes(preset: str, layout: str, message: str, hint: str):
    with pytest.raises(InputError) as caught:
        check_layout(load_config(preset), Layout.parse(layout))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_where_context_cannot_share_sequences_tensor_does():
    """Attention with latents is not split over `context`."""
    run = load_config("deepseek-v2-lite", ["batch.sequences=8"])
    with pytest.raises(InputError) as caught:
        check_layout(run, Layout.parse("expert=16"))
    assert "--layout expert=8,tensor=2 --set fold_experts=tensor: then devices" in caught.value.hint
    check_layout(overridden(run, ["fold_experts=tensor"]), Layout.parse("expert=8,tensor=2"))


def test_zero1_splits_embed_over_data_as_well():
    overrides = ["batch.sequences=24", "zero1=true"]
    with pytest.raises(
        InputError, match=r"model.embed_dim = 64 does not divide over data\*fsdp = 24"
    ) as caught:
        check_layout(load_config("bytes-nano", overrides), Layout.parse("data=12,fsdp=2"))
    assert "use data*fsdp=16 or 32, or model.embed_dim = 48 or 72" in caught.value.hint
    check_layout(load_config("bytes-nano", overrides[:1]), Layout.parse("data=12,fsdp=2"))


def test_zero1_splits_embed_over_context_as_well():
    overrides = ["batch.sequences=12", "batch.sequence_length=96", "zero1=true"]
    with pytest.raises(
        InputError, match=r"model.embed_dim = 64 does not divide over context\*data\*fsdp = 12"
    ) as caught:
        check_layout(load_config("bytes-nano", overrides), Layout.parse("data=4,context=3"))
    assert "use context*data*fsdp=8 or 16, or model.embed_dim = 60 or 72" in caught.value.hint
    check_layout(load_config("bytes-nano", overrides[:2]), Layout.parse("data=4,context=3"))


def test_the_sizes_that_are_suggested_do_work():
    config = load_config("llama3-8b", ["batch.microbatch_sequences=2"])
    with pytest.raises(InputError, match=r"use batch.sequences = 384 or 576, or data\*fsdp = 64 or 128"):
        check_layout(config, Layout.parse("data=96"))
    for override, layout in [
        ("batch.sequences=384", "data=96"),
        ("batch.sequences=576", "data=96"),
        ("seed=0", "data=64"),
        ("seed=0", "data=128"),
    ]:
        check_layout(
            load_config("llama3-8b", ["batch.microbatch_sequences=2", override]), Layout.parse(layout)
        )


def test_a_width_that_many_devices_do_not_divide_has_replicas_of_groups_that_do():
    run = load_config("llama3-8b", ["model.embed_dim=2880", "model.head_dim=64", "model.num_heads=64"])
    with pytest.raises(InputError, match=r"model.embed_dim = 2880 does not divide over fsdp = 256") as caught:
        check_layout(run, Layout.parse("fsdp=256"))
    assert "use data=4,fsdp=64 in place of fsdp=256" in caught.value.hint
    check_layout(run, Layout.parse("data=4,fsdp=64"))
    assert on_nearest_layout(run, 256).layout == "data=4,fsdp=64"
    assert on_nearest_layout(run, 64).layout == "fsdp=64"


@pytest.mark.parametrize(
    ("layout", "replicas"), [("data=1", 1), ("data=2,fsdp=4", 8), ("fsdp=4,tensor=2", 4), ("tensor=2", 1)]
)
def test_a_batch_per_replica_grows_with_the_replicas_and_the_rate_with_it(layout: str, replicas: int):
    overrides = ["batch.sequences_per_replica=6", "batch.base_sequences=12", "schedule.scale=linear"]
    given = load_config("bytes-nano", [*overrides, "batch.microbatch_sequences=3"])
    found = resolve_batch(given, Layout.parse(layout))
    check_layout(found, Layout.parse(layout))
    assert found.batch.sequences == 6 * replicas
    assert found.peak_learning_rate == pytest.approx(given.optimizer.learning_rate * replicas / 2)
    assert resolve_batch(found, Layout.parse("data=16")) == found  # a resolved batch stays on any layout


def test_a_batch_smaller_than_the_microbatch_is_one_microbatch():
    given = load_config("bytes-10m", ["batch.sequences=1"])
    found = resolve_batch(given, Layout.parse("tensor=2"))
    check_layout(found, Layout.parse("tensor=2"))
    assert found.batch.microbatch_sequences == 1
    with pytest.raises(
        InputError, match=r"batch.sequences = 5 is not a multiple of batch.microbatch_sequences"
    ):
        load_config("bytes-10m", ["batch.sequences=5"])


@pytest.mark.parametrize(
    ("layout", "microbatch"),
    [
        ("data=2", 4),  # its share is a whole multiple
        ("data=4,tensor=2", 4),
        ("data=8", 2),
        ("data=4,fsdp=4", 1),
    ],
)
def test_a_microbatch_is_at_most_a_replicas_share(layout: str, microbatch: int):
    given = load_config("bytes-nano", ["batch.sequences=16", "batch.microbatch_sequences=4"])
    found = resolve_batch(given, Layout.parse(layout))
    assert found.batch.microbatch_sequences == microbatch
    assert found.batch.sequences == 16
    check_layout(found, Layout.parse(layout))


def test_a_batch_that_does_not_divide_is_refused_with_the_microbatch_that_was_given():
    given = load_config("bytes-nano", ["batch.sequences=16", "batch.microbatch_sequences=4"])
    found = resolve_batch(given, Layout.parse("data=3"))
    with pytest.raises(InputError, match=r"= 16 does not divide over data\*fsdp = 3 x .*sequences = 4"):
        check_layout(found, Layout.parse("data=3"))


def test_without_a_batch_per_replica_a_run_stays_as_it_is():
    config = load_config("bytes-nano")
    assert resolve_batch(config, Layout.parse("data=8")) == config
    assert config.peak_learning_rate == config.optimizer.learning_rate


def test_layers_that_are_not_stacked_cannot_be_stages():
    config = load_config("bytes-nano", ["model.unroll=true"])
    with pytest.raises(
        InputError, match=r"model.unroll = true, but stage = 2 splits layers that are stacked"
    ):
        check_layout(config, Layout.parse("stage=2"))
    check_layout(config, Layout.parse("stage=1"))


def test_stages_keep_their_activations_on_the_devices():
    config = load_config("bytes-nano", ["remat=full", "offload=both"])
    with pytest.raises(InputError, match="offload = 'both', but stage = 2 keeps saved activations") as caught:
        check_layout(config, Layout.parse("stage=2"))
    assert 'use offload = "optimizer"' in caught.value.hint
    check_layout(config, Layout.parse("data=2"))
    check_layout(load_config("bytes-nano", ["offload=optimizer"]), Layout.parse("stage=2"))
    held = load_config("bytes-nano", ["offload=state"])
    with pytest.raises(InputError, match="offload = 'state', but stage = 2 keeps its layers on its devices"):
        check_layout(held, Layout.parse("stage=2"))


def test_chunks_divide_the_layers_of_a_stage_and_groups_of_microbatches_pass_them():
    run = ["pipeline_chunks=3", "batch.sequences=48", "batch.microbatch_sequences=1"]
    layout = Layout.parse("stage=16,tensor=8")
    with pytest.raises(InputError) as caught:
        check_layout(load_config("llama3-405b", run), layout)
    assert "pipeline_chunks = 3 does not divide the 8 layers of each of stage = 16" in caught.value.message
    assert "use pipeline_chunks = 2 or 4" in caught.value.hint
    check_layout(load_config("llama3-405b", [*run, "pipeline_chunks=4"]), layout)
    with pytest.raises(InputError) as caught:
        check_layout(load_config("llama3-405b", [*run, "pipeline_chunks=4", "batch.sequences=40"]), layout)
    assert "batch.sequences = 40 makes 40 microbatches, and with pipeline_chunks = 4" in caught.value.message
    assert caught.value.hint == "use batch.sequences = 32 or 48, or pipeline_chunks = 1"
    check_layout(load_config("llama3-405b", [*run, "pipeline_chunks=1", "batch.sequences=40"]), layout)
    with pytest.raises(InputError, match="does not divide the 7 groups of 2 layers of each of stage = 2"):
        check_layout(load_config("gemma-2-2b", ["pipeline_chunks=2"]), Layout.parse("stage=2"))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_the_share_of_passes_without_a_microbatch(schedule):
    ticks = Ticks(schedule=schedule, num_stages=4, num_microbatches=8)
    passes = [tick - stage for stage in range(4) for tick in range(ticks.num_passes)]
    assert ticks.bubble == Fraction(sum(m not in range(8) for m in passes), len(passes)) == Fraction(3, 11)


def test_padding_counts_as_bubble():
    run = load_config("llama3-405b", ["pipeline_chunks=8", "batch.microbatch_sequences=1"])
    ticks = ticks_of(run, Layout.parse("stage=16,data=64,tensor=8"))
    assert (ticks.num_microbatches, ticks.num_padded_layers) == (32, 128)
    # Of 8 x 32 + 15 passes through 128 layers, 8 x 32 with 126 are the model's.
    assert ticks.bubble == 1 - Fraction(256 * 126, 271 * 128)


def test_a_run_on_one_stage_has_no_ticks_and_on_several_those_of_its_microbatches():
    config = load_config("llama3-8b", ["pipeline=gpipe"])  # 512 sequences, one at a time
    assert ticks_of(config, Layout.parse("data=8")) is None
    ticks = ticks_of(config, Layout.parse("stage=4,data=2,fsdp=8"))
    assert (ticks.num_stages, ticks.num_microbatches, ticks.num_passes) == (4, 32, 35)
    assert ticks.to_dict() == {
        "schedule": "gpipe", "num_stages": 4, "num_chunks": 1, "num_microbatches": 32,
        "num_padded_layers": 32, "bubble": pytest.approx(3 / 35),
    }  # fmt: skip
    whole = load_config("bytes-nano")
    assert ticks_of(whole, Layout.parse("stage=2,data=2")).num_microbatches == 1


@pytest.mark.parametrize("chip", ["A100", "V100"])
def test_a_chip_without_fp8_units_is_refused_by_name(chip):
    config = load_config("bytes-nano", ("precision=fp8",))
    with pytest.raises(InputError, match=r"fp8-e4m3 and fp8-e5m2, for which .*100.* has no units") as caught:
        check_precision(config, Fleet.parse(f"1x{chip}").chip)
    assert "fp16" in caught.value.message  # what it has
    assert "or a chip that has them" in caught.value.hint


@pytest.mark.parametrize(("precision", "fleet"), [("fp8", "v4-8"), ("fp16", "v5p-8")])
def test_a_tpu_without_the_units_is_refused(precision, fleet):
    with pytest.raises(InputError, match="has no units"):
        check_precision(load_config("bytes-nano", (f"precision={precision}",)), Fleet.parse(fleet).chip)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("fleet", ["1xH100", "8xCPU"])
def test_a_chip_with_the_units_and_a_cpu_take_any_precision(precision, fleet):
    check_precision(load_config("bytes-nano", (f"precision={precision}",)), Fleet.parse(fleet).chip)


def test_a_model_without_products_in_eight_bits_is_refused():
    with pytest.raises(InputError, match="cruncher model has no products in eight bits"):
        load_config("cruncher", ("precision=fp8",))


@pytest.mark.parametrize(("num_layers", "held"), [(7, 2), (4, 1)])
def test_a_stage_holds_whole_groups_of_blocks_of_which_some_are_repeated(num_layers, held):
    layout = Layout.parse("stage=4")

    def run(layers):
        changes = [f"model.num_layers={layers}", "remat=full-every-2"]
        return resolve_batch(load_config("bytes-nano", changes), layout)

    check_layout(run(8), layout)
    with pytest.raises(InputError, match=rf"remat = 'full-every-2' has groups of 2 .*a chunk has {held} "):
        check_layout(run(num_layers), layout)


@pytest.mark.parametrize(
    ("fleet", "layout"),
    [
        ("2xv5e-256", "data=2,fsdp=256"),
        ("2xv5e-256", "fsdp=512"),  # each group has two halves
        ("4xv5e-256", "data=8,fsdp=16,tensor=8"),
        ("3xv5e-16", "stage=3,fsdp=16"),
        ("3xv5e-16", "data=6,tensor=8"),
        ("2xv5e-16", "tensor=32"),
        ("v5e-256", "data=4,fsdp=64"),
        ("6xH100", "data=2,fsdp=3"),
        ("48xH100", "data=2,fsdp=24"),  # NCCL joins what it likes
    ],
)
def test_layouts_whose_groups_lie_alike_in_slices_pass(fleet: str, layout: str):
    check_slices(Fleet.parse(fleet), Layout.parse(layout))


@pytest.mark.parametrize(
    ("fleet", "layout", "message", "hint"),
    [
        ("3xv5e-16", "data=2,fsdp=24", "groups of fsdp=24 straddle slices of 16", "use fsdp=16, which stays"),
        ("3xv5e-16", "data=4,fsdp=4,tensor=3", "groups of tensor=3 straddle", "use tensor=2 or 4"),
        ("3xv5e-256", "data=4,fsdp=192", "groups of fsdp=192 straddle slices of 256", "fsdp=128 or 256"),
        ("3xv5e-16", "fsdp=4,data=3,tensor=4", "groups of data=3 straddle", "use data=2 or 4"),
    ],
)
def test_groups_that_straddle_slices_are_named(fleet: str, layout: str, message: str, hint: str):
    with pytest.raises(InputError) as refused:
        check_slices(Fleet.parse(fleet), Layout.parse(layout))
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_experts_over_several_axes_divide_over_all_of_them():
    folded = load_config("bytes-moe", ["fold_experts=both", "batch.sequences=2"])
    check_layout(folded, Layout.parse("context=2,tensor=2"))
    with pytest.raises(
        InputError, match=r"model.num_experts = 4 does not divide over context\*expert\*tensor = 8"
    ):
        check_layout(folded, Layout.parse("context=2,expert=2,tensor=2"))


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("bytes-nano", ["fold_experts=tensor"], "but the model has no experts"),
        ("bytes-moe", ["fold_experts=context", "lora.rank=4"], "frozen experts are whole over context"),
        ("bytes-nano", ["expert_domains=2"], "expert_domains = 2, but the model has no experts"),
        ("bytes-moe", ["expert_domains=2", "model.capacity_factor=1.25"], "hold a row for each choice"),
    ],
)
def test_experts_that_cannot_be_folded_or_sent_to_are_refused(preset, changes, message):
    with pytest.raises(InputError, match=message):
        load_config(preset, changes)


def test_domains_of_experts_divide_their_devices():
    run = load_config("bytes-moe", ["expert_domains=4", "model.capacity_factor=none"])
    check_layout(run, Layout.parse("expert=4"))
    with pytest.raises(InputError, match="expert_domains = 4 does not divide the 2 devices of expert"):
        check_layout(run, Layout.parse("expert=2"))
    with pytest.raises(InputError, match="expert_domains = 4, but no axis of the layout splits the experts"):
        check_layout(run, Layout.parse("data=2"))


def test_pieces_of_a_sequence_hold_what_a_convolution_reads_before_the_next_one():
    config = load_config("bytes-nano")
    config = config.model_copy(update={"model": config.model.model_copy(update={"conv_width": 66})})
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"sequence_length": 256})})
    with pytest.raises(InputError, match=r"two pieces of 64, and model\.conv_width = 66 reads 65") as caught:
        check_layout(config, Layout.parse("context=2"))
    assert "use batch.sequence_length = 260 or more" in str(caught.value.hint)


def test_modules_for_further_tokens_have_neither_stages_nor_adapters():
    further = load_config("bytes-nano", ["model.mtp_layers=1"])
    check_layout(further, Layout.parse("fsdp=2,tensor=2"))
    with pytest.raises(InputError, match=r"model\.mtp_layers = 1, but stage = 2") as refused:
        check_layout(further, Layout.parse("stage=2"))
    assert "use fsdp=2 in place of stage" in refused.value.hint
    with pytest.raises(InputError, match=r"model\.mtp_layers = 1, and adapters"):
        load_config("bytes-nano", ["model.mtp_layers=1", "lora.rank=4"])
