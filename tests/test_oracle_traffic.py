"""Traffic against the textbook's volumes of data, sharded-data, tensor and context parallel steps, on H100.

What the compiled step sends beyond the textbook, or less, is named, and asserted too. The program: 4 layers
of width 256, 8 heads of 32, a gated MLP of 512, 1024 tokens of vocabulary, 32 sequences of 128, bf16. A ring
of N sends (N-1)/N of the whole array in an all-gather or a reduce-scatter, twice that in an all-reduce.
"""

from collections import Counter

import pytest

import meshwright as mw
from meshwright.ledger import Ledger

OVERRIDES = (
    "precision=bf16",
    "data.source=synthetic",
    "model.num_layers=4",
    "model.embed_dim=256",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.mlp_dim=512",
    "model.vocab_size=1024",
    "batch.sequences=32",
    "batch.sequence_length=128",
)
N = 8
LAYERS = 4 * (4 * 256 * 256 + 3 * 256 * 512)  # query, key, value, output; gate, up, down
TABLE = 1024 * 256  # the embedding; the head is as large
NORMS = 4 * 2 * 256  # of the layers; one more stands before the head
PARAMETERS = LAYERS + 2 * TABLE + NORMS + 256
TOKENS = 32 * 128
SCALARS = 2 * 128  # bytes sent for losses and norms of gradients


def sent(layout: str, *overrides: str) -> Counter[str]:
    """Bytes that one device sends in a step, by kind."""
    found: Counter[str] = Counter()
    for collective in weighed(layout, *overrides).traffic:
        found[collective.kind] += collective.wire_bytes
    return found


def ring(whole_bytes: float, size: int = N) -> float:
    return whole_bytes * (size - 1) / size


def over(ledger: Ledger, *axes: str) -> Counter[str]:
    """Bytes that one device sends along exactly these axes, by kind."""
    found: Counter[str] = Counter()
    for collective in ledger.traffic:
        if collective.axes == axes:
            found[collective.kind] += collective.wire_bytes
    return found


def weighed(layout: str, *overrides: str, on: str = "8xH100") -> Ledger:
    return mw.weigh("bytes-nano", on=on, layout=layout, overrides=[*OVERRIDES, *overrides]).ledger


def test_data_parallel_reduces_every_gradient_once_in_its_format():
    """Textbook: one all-reduce of the gradients, 2 bytes each. Added: the norms' are fp32."""
    found = sent("data=8")
    textbook = 2 * ring(2 * PARAMETERS)
    assert found["all-reduce"] == pytest.approx(textbook, rel=0.01)
    fp32 = 2 * ring((4 - 2) * (NORMS + 256))
    assert found.pop("all-reduce") == pytest.approx(textbook + fp32, abs=SCALARS)
    assert not found


def test_fsdp_gathers_twice_and_scatters_once_per_microbatch():
    """Textbook, each microbatch: two all-gathers of the parameters in bf16, one reduce-scatter of gradients.

    Less: embedding and head are gathered once, since the embedding's gradient does not need the embedding,
    and the loss makes the head's beside itself. The embedding's gradient is not scattered: each device is
    sent its columns of every token's gradient. Added: the norms are fp32 (the last is gathered once), and
    every device learns all tokens' numbers, 4 bytes each, to add those columns up by.
    """
    microbatches = 2
    found = sent("fsdp=8", "batch.microbatch_sequences=2")
    assert found.pop("all-reduce") <= SCALARS

    gathers = microbatches * 2 * ring(2 * PARAMETERS)
    tables_once = microbatches * ring(2 * 2 * TABLE)
    norms = microbatches * ring((4 - 2) * 2 * NORMS + (4 - 2 * 2) * 256)
    numbers = ring(4 * TOKENS)
    assert found.pop("all-gather") == pytest.approx(gathers - tables_once + norms + numbers, abs=SCALARS)

    scatters = microbatches * ring(2 * PARAMETERS)
    embedding = microbatches * ring(2 * TABLE)
    norms = microbatches * ring((4 - 2) * (NORMS + 256))
    assert found.pop("reduce-scatter") == pytest.approx(scatters - embedding + norms, abs=SCALARS)
    assert found.pop("all-to-all") == ring(2 * TOKENS * 256 / N)
    assert not found


def test_tensor_parallel_moves_the_residual_as_megatrons_sequence_parallelism_does():
    """Textbook (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2): each layer gathers
    the residual, tokens by width in bf16, for its attention and its MLP and scatters their sums, and again
    for the gradients: 4 all-gathers and 4 reduce-scatters.

    Added: 2 all-gathers a layer in the backward pass, of the same inputs, kept split by position (as there).
    Around the layers: the embedding's sum is scattered, its gradient gathered; the last residual is gathered
    for the loss, and its gradient summed whole. The loss sums three fp32 numbers of each token over the
    vocabulary's parts (four from jaxlib 0.12 on); the norms' gradients, of split positions, are fp32 sums.
    """
    residual = 2 * TOKENS * 256
    found = sent("tensor=8")
    assert found.pop("all-gather") == ring((4 * (4 + 2) + 2) * residual)
    assert found.pop("reduce-scatter") == ring((4 * 4 + 1) * residual)
    summed = 2 * ring(residual + 4 * (NORMS + 256))
    num_arrays = (found.pop("all-reduce") - summed) / (2 * ring(4 * TOKENS))
    assert round(num_arrays) in (3, 4)
    assert num_arrays == pytest.approx(round(num_arrays), abs=0.01)
    assert not found


@pytest.mark.wide
def test_tensor_parallel_replicas_of_one_row_gather_a_gradient_once_for_both_of_its_products():
    """As above, in sixteen microbatches of each of two replicas."""
    found = over(weighed("data=2,tensor=4", "batch.microbatch_sequences=1"), "tensor")
    residual = 2 * TOKENS * 256 / 2
    assert found["all-gather"] == ring((4 * (4 + 2) + 2) * residual, 4)
    assert found["reduce-scatter"] == ring((4 * 4 + 1) * residual, 4)


FP32_IN_USE = NORMS + 256  # vectors are gathered as they are used


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["data=8", "data=2,context=4", "context=8"])
def test_accumulation_reduces_once_over_data_and_context_however_many_microbatches(layout):
    """Textbook: one all-reduce of fp32 sums of gradients. Nothing is added, and none lies in a loop."""
    ledger = weighed(layout, "batch.microbatch_sequences=1")
    (reduction,) = (each for each in ledger.traffic if each.kind == "all-reduce")
    assert set(reduction.axes) == {part.split("=")[0] for part in layout.split(",")}
    assert (reduction.kind, reduction.count, reduction.in_loop) == ("all-reduce", 1, False)
    assert reduction.wire_bytes == pytest.approx(2 * ring(4 * PARAMETERS), abs=SCALARS)
    assert not ledger.findings


@pytest.mark.wide
def test_with_fsdp_inside_a_host_accumulation_reduces_a_shard_once_between_hosts():
    """Of the sums each device has 1/fsdp. The scatters over fsdp stay in each microbatch, in bf16, all but
    the embedding's gradient, which goes by columns."""
    ledger = weighed("data=2,fsdp=8", "batch.microbatch_sequences=1", on="16xH100")
    between = [c for c in ledger.traffic if "data" in c.axes]
    assert {c.link for c in between} == {"between"}
    assert sum(c.wire_bytes for c in between) == pytest.approx(2 * ring(4 * PARAMETERS / 8, 2), abs=SCALARS)
    assert not any(c.in_loop for c in between)
    assert over(ledger, "fsdp")["reduce-scatter"] == pytest.approx(
        2 * ring(2 * (PARAMETERS - TABLE)), rel=0.01
    )


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        pytest.param("data=8", 1, marks=pytest.mark.wide),
        pytest.param("data=2,fsdp=4", 4, marks=pytest.mark.wide),
    ],
)
def test_zero1_gathers_parameters_and_scatters_gradients_once(layout, parts):
    """Textbook (ZeRO, section 7): one gather of the parameters in bf16, one scatter of the fp32 sums, of a
    replica's part of them; and parameters and moments, 12 bytes each, are divided by all devices."""
    ledger, replicas = weighed(layout, "zero1=true", "batch.microbatch_sequences=1"), N // parts
    found = over(ledger, "data")
    assert found.pop("all-gather") == ring((2 * PARAMETERS + 2 * FP32_IN_USE) / parts, replicas)
    assert found.pop("reduce-scatter") == ring(4 * PARAMETERS / parts, replicas)
    assert found.pop("all-reduce") <= SCALARS
    assert not found
    assert not any(c.in_loop for c in ledger.traffic if "data" in c.axes)
    assert not ledger.findings
    assert ledger.memory.argument_bytes == pytest.approx(12 * PARAMETERS / N, rel=0.01)


@pytest.mark.parametrize("microbatch", [pytest.param(1, marks=pytest.mark.wide), 16])
def test_zero1_scatters_over_data_and_context_together(microbatch):
    """As above over both, whose sizes multiply to eight: fp32 sums in several microbatches, bf16 in one."""
    ledger = weighed("data=2,context=4", "zero1=true", f"batch.microbatch_sequences={microbatch}")
    found = over(ledger, "data", "context")
    assert found.pop("all-gather") == ring(2 * PARAMETERS + 2 * FP32_IN_USE)
    several = 4 * PARAMETERS
    one = 2 * PARAMETERS + 2 * FP32_IN_USE
    assert found.pop("reduce-scatter") == ring(several if microbatch == 1 else one)
    assert found.pop("all-reduce") <= SCALARS
    assert not found
    assert not over(ledger, "data")
    assert ledger.memory.argument_bytes == pytest.approx(12 * PARAMETERS / N, rel=0.01)


@pytest.mark.wide
def test_zero1_with_one_microbatch_scatters_layer_by_layer_inside_a_host_and_then_between():
    """In bf16, the layers' in the backward pass; the embedding's cross a host by columns."""
    ledger = weighed("data=2,fsdp=8", "zero1=true", on="16xH100")
    layers = [c for c in ledger.traffic if c.kind == "reduce-scatter" and c.in_loop]
    assert {(c.axes, c.link) for c in layers} == {(("fsdp",), "inside"), (("data",), "between")}
    assert over(ledger, "fsdp")["reduce-scatter"] == ring(2 * (LAYERS + TABLE))
    assert over(ledger, "data")["reduce-scatter"] == ring(2 * (LAYERS + 2 * TABLE) / 8, 2)
    assert over(ledger, "data")["all-gather"] == ring((2 * PARAMETERS + 2 * FP32_IN_USE) / 8, 2)


@pytest.mark.wide
def test_hybrid_sharding_scatters_inside_a_host_and_sums_a_shard_of_it_between():
    """Textbook: gathers and scatters over fsdp as fsdp alone; an all-reduce over data of 1/fsdp, in bf16. The
    embedding's gradient crosses a host by columns."""
    ledger = weighed("data=2,fsdp=8", on="16xH100")
    inside, between = over(ledger, "fsdp"), over(ledger, "data")
    assert inside["reduce-scatter"] == pytest.approx(ring(2 * (PARAMETERS - TABLE)), rel=0.01)
    assert inside["all-gather"] == pytest.approx(ring(2 * (2 * PARAMETERS - 2 * TABLE)), rel=0.01)
    assert between["all-reduce"] == pytest.approx(2 * ring(2 * PARAMETERS / 8, 2), rel=0.01)
    assert set(between) == {"all-reduce"}
    assert {c.link for c in ledger.traffic if c.axes == ("fsdp",)} == {"inside"}


# Experts: 8 of them, gated MLPs of 512, in place of the one MLP; each token chooses two, and there is room
# for exactly as many (a factor of 1). An expert's buffers hold 8 x capacity = 2 x tokens rows of width 256.
EXPERTS = ("model.num_experts=8", "model.experts_per_token=2", "model.capacity_factor=1.0")
EXPERTS += ("model.balancing_loss=0.01",)
ATTENTION = 4 * 4 * 256 * 256
EXPERTS_WEIGHTS = 4 * 8 * 3 * 256 * 512
FP32 = 4 * (4 * 256 * 8 + NORMS + 256)  # bytes of routers' and norms' gradients
SLOTS = 4 * (2 * TOKENS / N)  # of the buffers of a device, in all layers: one for each choice
EXCHANGED = 4 * SLOTS * 256 * 2 + 2 * SLOTS * 4  # rows in bf16; routers' weights in fp32 and their gradients
COUNTS = 512  # bytes a layer of what is summed for the figures of balance, losses and norms


def paid(layout: str, *overrides: str) -> Counter[str]:
    """Payload bytes of a step, by kind and axes."""
    found: Counter[str] = Counter()
    for collective in weighed(layout, *overrides).traffic:
        found[f"{collective.kind} {'+'.join(collective.axes)}"] += collective.payload_bytes
    return found


@pytest.mark.wide
def test_experts_exchange_their_buffers_four_times_a_layer_and_share_what_is_no_expert():
    """Textbook (https://arxiv.org/abs/2006.16668, section 3.2): an all-to-all to the experts and one back,
    and both again for the gradients, each of capacity x experts x embed. Here the routers' weights go with
    them, and their gradients back. The other parameters are gathered and scattered as with `fsdp=8`.
    """
    found = paid("expert=8", *EXPERTS)
    assert found.pop("all-to-all expert") == EXCHANGED + 2 * TOKENS / N * 256
    gathered = 2 * (2 * ATTENTION + FP32) - 4 * 256 + 2 * 2 * TABLE + 4 * TOKENS
    assert found.pop("all-gather expert") == gathered
    assert found.pop("reduce-scatter expert") == (2 * ATTENTION + 2 * TABLE + FP32) / N
    assert found.pop("all-reduce expert") <= 4 * COUNTS
    assert not found


@pytest.mark.wide
def test_experts_weights_are_gathered_and_scattered_over_fsdp_and_never_cross_the_expert_axis():
    found = paid("fsdp=2,expert=4", *EXPERTS)
    assert found.pop("all-to-all expert") == EXCHANGED
    experts, others = 2 * EXPERTS_WEIGHTS / 4, 2 * ATTENTION
    assert found.pop("all-gather fsdp") == 2 * experts
    assert found.pop("reduce-scatter fsdp") == experts / 2
    assert found.pop("all-gather fsdp+expert") == pytest.approx(2 * others + 2 * 2 * TABLE, rel=0.02)
    # With the head's; the embedding's goes by columns.
    assert found.pop("reduce-scatter fsdp+expert") == pytest.approx((others + 2 * TABLE) / N, rel=0.02)
    assert found.pop("all-to-all fsdp+expert") == 2 * TOKENS / N * 256
    assert found.total() < 4 * COUNTS + FP32


@pytest.mark.wide
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_zero1_gathers_and_scatters_once_a_step_over_data_and_what_is_no_expert_over_expert(microbatches):
    """Textbook: every gradient is scattered once over the devices that use the same parameter.

    That of one microbatch has the format of its product, a sum of several is fp32.
    """
    rows = f"batch.microbatch_sequences={32 // N // microbatches}"
    found = paid("data=2,expert=4", "zero1=true", rows, *EXPERTS)
    experts, others = EXPERTS_WEIGHTS / 4, ATTENTION + 2 * TABLE
    each = 2 if microbatches == 1 else 4
    assert found.pop("all-to-all expert") == EXCHANGED
    assert found.pop("all-gather data") == 2 * experts
    assert found.pop("reduce-scatter data") == each * experts / 2
    assert found.pop("all-gather data+expert") == 2 * others + FP32
    assert found.pop("reduce-scatter data+expert") == (each * others + FP32) / N
    assert found.pop("all-reduce data+expert") <= microbatches * 4 * COUNTS
    assert not found


@pytest.mark.wide
def test_experts_buffers_are_gathered_and_scattered_over_tensor():
    """As the residual before and after a dense MLP, but buffers have a row for each choice: 2 for a token.

    In a layer 3 gathers of the residual for attention (one again, for the backward pass) and 3 of buffers,
    2 scatters of each; around the layers 2 gathers and a scatter, as with dense MLPs. The routers' weights of
    the slots, in fp32, are gathered forward and backward, and their gradients scattered.
    """
    found = paid("expert=4,tensor=2", *EXPERTS)
    weights = 2 * TOKENS / 4 * 4
    residual = TOKENS / 4 * 256 * 2  # of an expert's replica; `tensor` has it whole, and scatters halves
    assert found.pop("all-gather tensor") == 4 * (3 * 3 * residual + 2 * weights) + 2 * residual
    assert found.pop("reduce-scatter tensor") == (4 * (2 * 3 * residual + weights) + residual) / 2
    assert found.pop("all-to-all expert") == EXCHANGED + 2 * TOKENS / 4 * 256  # of the embedding's gradient
    assert found.pop("all-gather expert") == pytest.approx(2 * ATTENTION + 2 * TABLE, rel=0.04)
    # The compiler of jaxlib 0.12 scatters norms' and routers' gradients too, and sums halves over `tensor`.
    assert found.pop("reduce-scatter expert") == pytest.approx((ATTENTION + TABLE) / 4, rel=0.04)
    assert found.pop("all-reduce expert+tensor") <= FP32 + 4 * COUNTS
    # The gradient of the last residual, and the loss's three or four fp32 numbers of a token.
    assert found.pop("all-reduce tensor") == pytest.approx(residual, rel=0.05)


@pytest.mark.wide
def test_context_parallel_gathers_keys_and_values_twice_and_scatters_their_gradients():
    """Textbook (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2): gradients are reduced as in a data
    parallel step. Each layer gathers keys and values in bf16, forward and backward, and scatters their
    gradients, here in fp32.
    """
    found = sent("context=8")
    reduced = 2 * ring(2 * PARAMETERS) + 2 * ring((4 - 2) * (NORMS + 256))
    assert found.pop("all-reduce") == pytest.approx(reduced, abs=SCALARS)
    both = 2 * 256 * TOKENS
    assert found.pop("all-gather") == 4 * 2 * ring(2 * both)
    assert found.pop("reduce-scatter") == 4 * ring(4 * both)
    assert not found


@pytest.mark.wide
def test_keys_and_values_of_long_sequences_go_round_a_ring_and_their_gradients_after_them():
    """Where those of a layer take more than 256 MiB, here twice that. Each layer sends what a device holds,
    in bf16, round a ring (N-1 hops) forward, and again backward; there the gradients follow in fp32, and
    come home in bf16 with one hop more. Nothing gathers keys or values.
    """
    length = 2**19
    found = sent("context=8", "batch.sequences=1", f"batch.sequence_length={length}")
    found.pop("all-reduce")
    held = 2 * 256 * length / N  # keys and values of one device
    assert found.pop("collective-permute") == 4 * held * (2 * (N - 1) + 2 * (N - 1) + 4 * (N - 1) + 2)
    assert not found
