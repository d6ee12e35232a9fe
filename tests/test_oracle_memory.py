"""Whose the bytes at the peak are, against sizes by hand: `cruncher` and a Transformer of two layers."""

import pytest

import meshwright as mw
from meshwright.config import preset_names
from meshwright.ledger import MemoryLedger

FLOAT, HALF = 4, 2  # bytes


def memory(preset: str, on: str, *overrides: str) -> MemoryLedger:
    return mw.weigh(preset, on=on, overrides=["data.source=synthetic", *overrides]).ledger.memory


def assert_hardly_a_byte_is_without_an_owner(found: MemoryLedger) -> None:
    assert found.by_category.get("other", 0) < 0.03 * found.reserved_bytes
    unsure = sum(found.by_certainty.get(kind, 0) for kind in ("inherited", "fallback"))
    assert unsure <= 0.15 * found.reserved_bytes


def moments_of(found: MemoryLedger) -> dict[str, int]:
    return {name: size for name, size in found.optimizer_state_by_moment.items() if name != "count"}


# cruncher: B rows, two layers of W by W and a head of W by 1. Its peak lies where the backward pass has
# begun: alive are the gradient of the second layer's output and, for the gradients of head and second
# matrix, the outputs of both layers.
B, W = 8192, 512
WIDE = (f"batch.sequences={B}", f"model.width={W}")
CRUNCHER = 2 * W * W + W


def test_crunchers_bytes_on_one_gpu_are_those_by_hand():
    found = memory("cruncher", "1xH100", *WIDE)
    categories = found.by_category
    assert categories["parameters"] == FLOAT * CRUNCHER
    assert categories["batch"] == FLOAT * (B * W + B)  # inputs and targets
    assert categories["saved_activations"] == FLOAT * 2 * B * W
    # Beside it the gradient of the prediction, and partial sums of the head's.
    assert categories["activation_gradients"] == pytest.approx(FLOAT * B * W, rel=0.015)
    assert "optimizer_state" not in categories  # plain gradient descent
    assert_hardly_a_byte_is_without_an_owner(found)


def test_crunchers_bytes_on_one_of_eight_cpus_are_an_eighth_of_the_rows_and_adams_moments():
    found = memory("cruncher", "8xCPU", *WIDE, "optimizer.kind=adamw")
    categories, rows = found.by_category, B // 8
    assert categories["parameters"] == FLOAT * CRUNCHER
    assert moments_of(found) == {"mu": FLOAT * CRUNCHER, "nu": FLOAT * CRUNCHER}
    assert categories["batch"] == FLOAT * (rows * W + rows)
    assert categories["saved_activations"] == FLOAT * (2 * rows * W + 2 * rows)  # prediction, error
    assert categories["activation_gradients"] == FLOAT * rows * W
    assert_hardly_a_byte_is_without_an_owner(found)


# A Transformer of two layers: width E, 4 heads and 2 key-value heads of 16, a gated MLP of M.
E, M, KV, LENGTH = 64, 128, 2 * 16, 64
LAYER = 2 * E * E + 2 * E * KV + 3 * E * M + 2 * E  # and two norms
VOCAB = 8192


def parameters_of(vocab: int) -> int:
    return 2 * LAYER + E + 2 * vocab * E


def test_a_transformers_bytes_with_nothing_rematerialised_are_those_by_hand():
    """Two microbatches of T tokens, whose peak lies where the loss ends. Saved of each token, in float32:

    * two norms: the input, 1/rms, and the result, which the matrices take: 4 E + 2;
    * attention: query, key, value, its output, and for each head two sums: 2 E + 2 KV + 2 x 4. Scores are
      made again, not kept. As both layers are written out, XLA keeps the output before its division too: E;
    * the MLP: gate, up, and their product, which `down` takes: 3 M;
    * once, for the last norm: its input and 1/rms.
    """
    tokens, vocab = 64 * LENGTH, 4096
    sequences = ("batch.sequences=128", "batch.microbatch_sequences=64", f"model.vocab_size={vocab}")
    found = memory("bytes-nano", "1xH100", *sequences, "remat=none")
    parameters, categories = parameters_of(vocab), found.by_category
    assert categories["parameters"] == FLOAT * parameters
    assert moments_of(found) == {"mu": FLOAT * parameters, "nu": FLOAT * parameters}
    assert categories["gradients"] == FLOAT * parameters  # the sum over microbatches
    assert categories["batch"] == 4 * 128 * (LENGTH + 1)
    saved = FLOAT * tokens * (2 * (7 * E + 2 * KV + 2 * 4 + 3 * M + 2) + E + 1)
    assert categories["saved_activations"] == pytest.approx(saved, rel=0.01)
    # Logits and their gradient, and a few numbers of each token.
    assert categories["logits_and_loss"] == pytest.approx(FLOAT * tokens * 2 * vocab, rel=0.01)
    assert_hardly_a_byte_is_without_an_owner(found)


@pytest.mark.wide
def test_a_transformers_bytes_at_a_peak_of_logits_on_one_gpu_are_those_by_hand():
    """bf16, full rematerialisation: between forward and backward pass, the loss holds logits and their
    gradient at once, both in bf16. Saved are the two layers' inputs, the last residual, and that normed."""
    tokens = 64 * LENGTH
    sizes = ("batch.sequences=64", f"model.vocab_size={VOCAB}", "remat=full", "precision=bf16")
    found = memory("bytes-nano", "1xH100", *sizes)
    parameters, categories = parameters_of(VOCAB), found.by_category
    assert categories["parameters"] == FLOAT * parameters
    assert (
        found.optimizer_state_by_moment["mu"] == found.optimizer_state_by_moment["nu"] == FLOAT * parameters
    )
    sums = FLOAT * tokens  # of each token: log-sum-exp; 1/rms
    assert categories["logits_and_loss"] == 2 * HALF * tokens * VOCAB + sums
    assert categories["saved_activations"] == HALF * tokens * E * (2 + 1 + 1) + sums
    assert categories["gathered_parameters"] == HALF * VOCAB * E  # the head, cast
    assert_hardly_a_byte_is_without_an_owner(found)


def test_a_transformers_bytes_at_a_peak_of_logits_on_one_of_eight_cpus_are_those_by_hand():
    """float32. The compiler holds the probabilities, their difference to the targets, and that turned."""
    tokens = 64 * LENGTH // 8
    found = memory("bytes-nano", "8xCPU", "batch.sequences=64", f"model.vocab_size={VOCAB}", "remat=full")
    parameters, categories = parameters_of(VOCAB), found.by_category
    assert categories["parameters"] == FLOAT * parameters
    assert (
        found.optimizer_state_by_moment["mu"] == found.optimizer_state_by_moment["nu"] == FLOAT * parameters
    )
    assert categories["logits_and_loss"] == pytest.approx(3 * FLOAT * tokens * VOCAB, rel=0.001)
    # The layers' inputs, the last residual, that normed, and scaled; 1/rms.
    assert categories["saved_activations"] == pytest.approx(FLOAT * tokens * E * (2 + 1 + 1 + 1), rel=0.02)
    # Adding the layers' and the embedding's has begun.
    assert categories["gradients"] == pytest.approx(FLOAT * (VOCAB * E + 2 * LAYER), rel=0.001)
    assert_hardly_a_byte_is_without_an_owner(found)


@pytest.mark.wide
def test_no_gathered_matrix_is_kept_for_the_backward_pass():
    """Kept, the layers' matrices would lie whole on every device: what FSDP is there to avoid."""
    overrides = ("batch.sequences=64", "remat=none", "precision=bf16", "layout=fsdp=8")
    buffers = memory("bytes-nano", "8xH100", *overrides).buffers
    saved = {b.shape.split("[")[1] for b in buffers if b.category == "saved_activations"}
    assert f"2,8,{LENGTH},{M}]" in saved  # of the MLP, two layers
    assert not saved & {f"2,{E},{M}]", f"2,{M},{E}]", f"2,{E},4,16]", f"2,4,16,{E}]"}


@pytest.mark.wide
def test_attentions_blocks_are_computed_again_on_many_devices_as_on_one():
    """Kept, their scores would take rows x heads x positions squared of each layer."""
    overrides = ["remat=none", "precision=fp32"]
    found = [
        mw.weigh("bytes-nano", on=f"{devices}xCPU", layout=f"fsdp={devices}", overrides=overrides)
        for devices in (1, 8)
    ]
    alone, shared = (weighed.compiled.traced_flops.by_phase["recompute"] for weighed in found)
    assert alone == shared > 0
    saved = [b.shape for b in found[1].ledger.memory.buffers if b.category == "saved_activations"]
    scores = f"{LENGTH},{LENGTH}]"
    assert not [
        shape for shape in saved if shape.startswith("f32") and shape.count(",") > 3 and scores in shape
    ]


FLEETS = {"llama3-405b": "512xH100", "llama3-70b": "64xH100", "gpt3-175b": "64xH100", "gpt2-124m": "1xH100"}


@pytest.mark.long
@pytest.mark.parametrize("preset", preset_names())
def test_hardly_a_byte_of_any_preset_is_without_an_owner(preset):
    found = mw.weigh(preset, on=FLEETS.get(preset, "8xH100")).ledger.memory
    assert_hardly_a_byte_is_without_an_owner(found)
