"""Traffic against the textbook's volumes of data, sharded-data and tensor parallel steps, on eight H100.

What the compiled step sends beyond the textbook, or less, is named, and asserted too. The program: 4 layers
of width 256, 8 heads of 32, a gated MLP of 512, 1024 tokens of vocabulary, 32 sequences of 128, bf16. A ring
of N sends (N-1)/N of the whole array in an all-gather or a reduce-scatter, twice that in an all-reduce.
"""

from collections import Counter

import pytest

import meshwright as mw

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
    for collective in mw.weigh(
        "bytes-nano", on="8xH100", layout=layout, overrides=[*OVERRIDES, *overrides]
    ).ledger.traffic:
        found[collective.kind] += collective.wire_bytes
    return found


def ring(whole_bytes: float) -> float:
    return whole_bytes * (N - 1) / N


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
