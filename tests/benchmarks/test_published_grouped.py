"""What others' software runs for a layer of experts: counts by hand, and rules that a recipe turns on."""

import sys
from dataclasses import replace
from math import comb
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _published_attention import attention_seconds
from _published_grouped import (
    Kernels,
    experts_bytes,
    grouped_seconds,
    grouped_share,
    launch_seconds,
    layer_bytes,
)
from _published_mamba import copied_bytes, mamba_bytes, mamba_seconds, memory_share
from _published_narrow import casts_in_products, without_casts
from _published_sizes import Sizes
from _published_stacks import Stack, seconds_of_experts
from _published_tensor import seconds_in_pieces, waited_seconds

from meshwright.config import load_config
from meshwright.hardware import Fleet
from meshwright.predict import machine_of


def sizes(layout: str = "expert=8", *overrides: str) -> Sizes:
    batch = ("batch.sequences=64", "batch.sequence_length=4096", "batch.microbatch_sequences=1")
    run = load_config("Qwen/Qwen3-30B-A3B", [f"layout={layout}", *batch, "precision=fp8", *overrides])
    return Sizes.of(run)


MACHINE = machine_of(Fleet.parse("8xGB200"), None)


@pytest.mark.parametrize(
    ("chip", "width", "share"),
    [
        ("H100", 768, 0.45),
        ("H100", 14336, 0.82),
        ("GB300", 1536, 0.61),
        ("H100", 100, 0.45),
        ("A100-80GB", 768, None),
    ],
)
def test_a_narrow_expert_reaches_less_and_an_unknown_chip_nothing(chip, width, share):
    assert grouped_share(chip, width) == share


def test_between_measured_widths_the_share_lies_between_theirs():
    shares = [grouped_share("GB200", width) for width in (768, 1024, 1536, 2048, 14336)]
    assert shares == sorted(shares)


def test_a_replica_is_each_device_of_experts_and_holds_its_share_of_them():
    found = sizes()
    assert (found.replicas, found.microbatches, found.experts_apart) == (8, 8, 8)
    # By hand: queries, keys and values, the output; a router; 16 of 128 experts of three matrices.
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    assert found.weights == attention + 2048 * 128 + 16 * 3 * 2048 * 768


def test_a_layers_bytes_are_those_of_its_kernels_by_hand():
    width, queries, keys, hidden = 2048, 4096, 512, 768
    once = 48 * width + 12 * queries + 16 * keys + 12 * (queries + keys)
    rows, activations = 2 * 14 * 8 * width, 16 * 8 * hidden
    assert layer_bytes(sizes(), Kernels()) == once + rows + activations
    narrow = layer_bytes(sizes(), Kernels(eight_bits=True, fused=True))
    assert narrow == once + rows + 8 * 8 * width + 12 * width
    assert experts_bytes(sizes(), Kernels()) == rows + activations
    # Sent once to 8 devices: each holds one of eight chosen of 128 experts with a probability of 0.667.
    reached = 8 * (1 - comb(112, 8) / comb(128, 8))
    by_once = experts_bytes(sizes(), Kernels(sends_once=True))
    assert by_once == pytest.approx(2 * (6 * 8 + 2 * reached) * width + activations)


def test_a_bound_and_biases_of_experts_are_eager_kernels_by_hand():
    batch = ("batch.sequences=64", "batch.sequence_length=4096", "batch.microbatch_sequences=1")
    run = load_config("openai/gpt-oss-120b", ["layout=expert=64", *batch])
    biased, chosen, width = Sizes.of(run), 4, 2880
    unlike = {"expert_bias": False, "gate_limit": None}
    bare = replace(biased, model=biased.model.model_copy(update=unlike))
    for kernels, bias in ((Kernels(), 28), (Kernels(sends_once=True), 68)):
        more = experts_bytes(biased, kernels) - experts_bytes(bare, kernels)
        assert more == pytest.approx(chosen * width * (bias + 36))
    fused = Kernels(fused=True)
    assert experts_bytes(biased, fused) == experts_bytes(bare, fused)
    again = Kernels(repeats=("norms", "activation"))
    more = layer_bytes(biased, again) - layer_bytes(biased, Kernels())
    assert more == pytest.approx(2 * 4 * width + chosen * width * (6 + 16))
    assert launch_seconds(biased) == pytest.approx(2 * (22 + 7) * 15e-6)


def hybrid(*overrides: str) -> Sizes:
    few = ("model.mamba_heads=64", "model.mamba_head_dim=64", "model.mamba_groups=8")
    state = ("model.mamba_state_dim=128", "model.conv_width=4", "model.num_layers=3")
    pattern = ("model.layer_pattern=mamba+experts attention+experts mamba", "model.shared_mlp_dim=512")
    return sizes("expert=8", *few, *state, *pattern, *overrides)


def test_a_hybrids_bytes_are_the_mean_of_its_layers_by_hand():
    found, several = hybrid(), hybrid("batch.microbatch_sequences=2")
    width, queries, keys, hidden = 2048, 4096, 512, 768
    inner, shared, states, scores = 4096, 2 * 8 * 128, 4096 * 128 / 128, 8 * 128
    attention = 12 * queries + 16 * keys + 12 * (queries + keys)
    experts = 16 * 512 + 2 * 14 * 8 * width + 16 * 8 * hidden
    # Five parts have a norm and a residual: three mixers and two MLPs. Mamba-2's kernels are priced apart.
    whole = attention + 2 * experts + 5 * 24 * width
    assert layer_bytes(found, Kernels()) == pytest.approx(whole / 3)
    turned, cast = 24 * inner + 8 * shared, 12 * inner + 4 * shared
    assert layer_bytes(several, Kernels()) == pytest.approx((whole + 2 * turned) / 3)
    assert copied_bytes(several, eight_bits=True) == turned + cast
    assert mamba_bytes(found) == 68 * inner + 37 * shared + 46 * states + 32 * scores


def test_mamba_2_takes_what_profiles_of_its_kernels_show():
    found, hopper = hybrid(), machine_of(Fleet.parse("8xH100"), None)
    least = 4096 * mamba_bytes(found) / hopper.memory_bytes_per_second
    assert mamba_seconds(found, hopper) == pytest.approx(2 / 3 * least / 0.51)
    assert mamba_seconds(sizes(), hopper) == 0


@pytest.mark.parametrize(
    ("chip", "tokens", "share"),
    [
        ("H100", 4096, 0.51),
        ("H100", 20000, 0.51),
        ("GB300", 32768, 0.51 * 0.492 / 0.732),
        ("TPU v5p", 8192, 0.51),
    ],
)
def test_mamba_2_on_other_chips_differs_as_its_convolution_does(chip, tokens, share):
    assert memory_share(chip, tokens) == pytest.approx(share)


def test_whole_experts_over_tensor_have_all_of_their_matrices_and_a_part_of_the_rows():
    split, whole = sizes("expert=4,tensor=2"), sizes("expert=4,tensor=2", "fold_experts=tensor")
    assert (whole.experts_apart, whole.tensor_of_experts, whole.tokens_of_experts) == (8, 1, 2048)
    assert (split.experts_apart, split.tensor_of_experts, split.tokens_of_experts) == (4, 2, 4096)
    assert waited_seconds(whole, MACHINE) == pytest.approx(waited_seconds(split, MACHINE) / 2)
    alone, both = (seconds_in_pieces(each, MACHINE, eight_bits=True)[1] for each in (whole, split))
    assert alone < both


def test_products_from_latents_take_their_flops():
    batch = ("batch.sequences=64", "batch.sequence_length=4096", "batch.microbatch_sequences=1")
    run = Sizes.of(load_config("deepseek-ai/DeepSeek-V3", ["layout=expert=64", "precision=fp8", *batch]))
    stack = replace(GROUPED, repeats=("latents",))
    again = added(stack, run)["products from latents again"]
    flops = 2 * 4096 * 128 * (512 * 256 + 1536 * 192)
    least = run.layers * run.ticks * flops / MACHINE.peak_flops_per_second["fp8-e4m3"]
    assert least < again < 2.5 * least
    assert "products from latents again" not in added(GROUPED, run)


def test_grouped_products_are_never_faster_than_ours_and_narrow_ones_slower():
    many = sizes("expert=8", "batch.microbatch_sequences=8")
    measured, ours = grouped_seconds(many, MACHINE, eight_bits=True)
    flops = 3 * 3 * 2 * 8 * 4096 * 8 * 2048 * 768
    assert measured == pytest.approx(flops / (0.365 * MACHINE.peak_flops_per_second["fp8-e4m3"]))
    assert measured > ours
    wide = sizes("expert=8", "model.mlp_dim=12288")
    measured, ours = grouped_seconds(wide, MACHINE, eight_bits=False)
    assert measured == ours


MESSAGES = {"all-to-all[expert]": 2.0}
EXPOSED = {"all-to-all[expert]": 1.5, "attention": 1.0, "matmul": 3.0}
GROUPED = Stack(name="theirs", groups_products=True)


def added(stack: Stack, of: Sizes | None = None) -> dict[str, float]:
    return seconds_of_experts(stack, "fp8", of or sizes(), MACHINE, EXPOSED, MESSAGES)


def test_a_stack_without_rules_of_experts_and_a_model_without_experts_add_nothing():
    assert added(Stack(name="ours")) == {}
    dense = Sizes.of(load_config("llama3-8b", ["layout=data=8"]))
    assert added(GROUPED, dense) == {}


def test_messages_beside_products_save_what_was_measured_where_two_microbatches_are_combined():
    beside, apart = replace(GROUPED, overlaps_experts=True), {"attention": 1.0}
    assert added(beside)["experts' messages beside products"] == pytest.approx(2.0 * (1 - 0.44 * 7 / 8) - 1.5)
    hidden = seconds_of_experts(beside, "fp8", sizes(), MACHINE, apart, MESSAGES)
    assert hidden["experts' messages beside products"] == pytest.approx(2.0 * (1 - 0.44 * 7 / 8))
    one = added(beside, sizes("expert=8", "batch.microbatch_sequences=8"))
    assert one["experts' messages beside products"] == pytest.approx(2.0 - 1.5), "one microbatch hides none"


def test_experts_take_what_their_launches_take_where_the_host_is_slower():
    launches, few = "launches that a dispatch waits for", sizes()
    one, router, whole = (added(replace(GROUPED, graphs=graphs), few) for graphs in ("", "router", "whole"))
    device = grouped_seconds(few, MACHINE, eight_bits=True)[0]
    device += 4096 * experts_bytes(few, Kernels(eight_bits=True)) / (0.85 * MACHINE.memory_bytes_per_second)
    assert launch_seconds(few) == pytest.approx(16 * 22 * 15e-6)
    assert router[launches] == pytest.approx(few.layers * few.ticks * (launch_seconds(few) - device))
    assert one[launches] == router[launches], "attention takes longer than its launches"
    assert launches not in whole
    assert launches not in added(replace(GROUPED, waits_for_counts=False))
    many = sizes("expert=64", "batch.microbatch_sequences=8", "batch.sequences=512")
    assert added(replace(GROUPED, graphs="router"), many)[launches] == 0


def test_what_is_launched_around_experts_waits_where_the_device_is_faster():
    few = sizes()
    nothing = seconds_of_experts(GROUPED, "fp8", few, MACHINE, {}, MESSAGES)
    some = seconds_of_experts(replace(GROUPED, graphs="router"), "fp8", few, MACHINE, {}, MESSAGES)
    launches = "launches that a dispatch waits for"
    ours = grouped_seconds(few, MACHINE, eight_bits=True)[1]
    around = few.layers * few.ticks * (0.75 * 3.6e-3 + ours)  # here attention takes less than no time
    assert nothing[launches] - some[launches] == pytest.approx(around)


def test_a_stack_without_overlap_waits_for_all_of_its_exchanges():
    assert added(GROUPED)["experts' messages waited for"] == pytest.approx(2.0 - 1.5)
    assert "experts' messages waited for" not in added(replace(GROUPED, overlaps_experts=True))


def test_casts_of_what_leaves_and_enters_an_activation_are_read_and_written():
    fused, apart = (layer_bytes(sizes(), Kernels(eight_bits=True, fused=each)) for each in (True, False))
    wide_fused, wide = (layer_bytes(sizes(), Kernels(fused=each)) for each in (True, False))
    assert (apart - fused) - (wide - wide_fused) == pytest.approx(8 * 12 * 768)


def test_a_rotation_that_scales_is_not_fused():
    run = load_config("openai/gpt-oss-120b", ["layout=expert=64", "batch.microbatch_sequences=1"])
    plain = run.model.model_copy(update={"rope_gain": 1.0})
    scaled, without = Sizes.of(run), Sizes.of(run.model_copy(update={"model": plain}))
    assert layer_bytes(scaled, Kernels()) - layer_bytes(without, Kernels()) == 50 * (64 + 8) * 64


def test_attention_has_the_seconds_of_cudnns_own_tables():
    few = sizes()
    found = attention_seconds(few, MACHINE, 1.0, eight_bits=False)
    flops = 32 * 4096**2 * 128  # of one product, for the scores that the mask leaves
    assert found == pytest.approx(48 * 8 * flops * (2 / 0.563 + 5 / 0.459) / 2.5e15)
    narrow = added(replace(GROUPED, measured_attention=True, narrow_attention=True))
    assert narrow["attention by cuDNN's tables"] == pytest.approx(found - 1.0)
    eight = attention_seconds(few, MACHINE, 1.0, eight_bits=True)
    assert narrow["attention in 8 bits"] == pytest.approx(eight - found)
    assert found == attention_seconds(few, MACHINE, 7.0, eight_bits=False), "no part of it is ours"


def test_heads_that_the_tables_lack_keep_our_seconds():
    run = load_config("openai/gpt-oss-120b", ["layout=expert=64", "batch.microbatch_sequences=1"])
    oss = Sizes.of(run)
    whole, window = oss.length / 2, 128
    local = attention_seconds(oss, MACHINE, 0.0, eight_bits=False)
    assert local > 0, "layers with a window are in the tables"
    found = attention_seconds(oss, MACHINE, 1.0, eight_bits=False) - local
    assert found == pytest.approx(whole / (whole + window))
    hopper = machine_of(Fleet.parse("8xH100"), None)
    assert attention_seconds(oss, hopper, 1.0, eight_bits=False) == pytest.approx(1.0)


def test_products_without_casts_gain_most_where_they_are_small():
    alone = without_casts(MACHINE)

    def gain(size: int) -> float:
        shape = {"m": size, "n": size, "k": size, "num_bytes": 4 * size**2}
        return MACHINE.product_seconds("fp8-e4m3", **shape) / alone.product_seconds("fp8-e4m3", **shape)

    assert gain(1024) > gain(4096) > gain(16384) > 0.95
    shape = {"m": 4096, "n": 4096, "k": 4096, "num_bytes": 2**25}
    assert alone.product_seconds("bf16", **shape) == MACHINE.product_seconds("bf16", **shape)
    unknown = machine_of(Fleet.parse("8xA100-80GB"), None)
    assert without_casts(unknown) is unknown
    assert added(GROUPED)["casts in the tables of products"] < 0
    latent = Sizes.of(load_config("deepseek-ai/DeepSeek-V3", ["layout=expert=8", "precision=fp8"]))
    assert casts_in_products(latent, MACHINE) > 0


def test_attention_in_eight_bits_is_faster():
    assert added(replace(GROUPED, narrow_attention=True))["attention in 8 bits"] == pytest.approx(-0.16)
