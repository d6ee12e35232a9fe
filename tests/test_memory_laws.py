"""What a change of the config does to the memory of the compiled step, by category: metamorphic laws."""

import jax
import pytest

import meshwright as mw
from meshwright.ledger import MemoryLedger

# Every gradient at the peak has its parameters' shape, and nothing is recomputed but attention's scores.
# So many layers are a loop, and the peak lies where its backward pass begins.
COMMON = ("batch.sequences=64", "remat=none", "model.num_layers=20")
# Fragmentation and what XLA keeps of a scalar now and then: part of no law.
UNRULED = {"fragmentation", "outputs", "constants", "optimizer_temporaries", "step", "keys", "other"}


def memory(*overrides: str) -> MemoryLedger:
    return mw.weigh("bytes-nano", on="1xH100", overrides=[*COMMON, *overrides]).ledger.memory


@pytest.fixture(scope="module")
def base() -> MemoryLedger:
    return memory()


def changed(before: MemoryLedger, after: MemoryLedger, *, least: float = 0.005) -> set[str]:
    """Categories that differ by more than `least` of themselves."""
    names = before.by_category.keys() | after.by_category.keys()
    return {
        name
        for name in names - UNRULED
        if abs(after.by_category.get(name, 0) - before.by_category.get(name, 0))
        > least * max(after.by_category.get(name, 0), before.by_category.get(name, 0))
    }


@pytest.mark.wide
def test_twice_the_batch_doubles_what_hangs_on_rows_and_nothing_else(base):
    twice = memory("batch.sequences=128")
    # In jaxlib 0.12 the larger one's peak lies within the last layer's forward pass, with its values twice.
    saved = 2 * base.by_category["saved_activations"]
    assert twice.by_category["saved_activations"] == pytest.approx(
        saved, rel=0.005 if jax.__version_info__ < (0, 12) else 0.02
    )
    assert twice.by_category["batch"] == 2 * base.by_category["batch"]
    # Attention's scores, computed again, and the loss of each row hang on rows too; which of them live at
    # the peak differs between versions of jaxlib.
    rows = {"saved_activations", "activation_gradients", "batch"}
    assert changed(base, twice, least=0.02) - {"recomputed_activations", "logits_and_loss"} == rows


def test_sgd_in_the_place_of_adam_removes_exactly_the_moments(base):
    plain = memory("optimizer.kind=sgd")
    assert base.optimizer_state_by_moment["mu"] == base.by_category["parameters"]
    # And a count, where it is alive at the peak: the compiler of jaxlib 0.12 copies it at once.
    assert base.by_category["optimizer_state"] - 2 * base.by_category["parameters"] in (0, 4)
    assert plain.optimizer_state_by_moment == {}
    assert changed(base, plain) == {"optimizer_state"}


@pytest.mark.wide
def test_twice_the_vocabulary_adds_its_rows_to_parameters_moments_and_gradients_alone(base):
    larger = memory("model.vocab_size=512")
    rows = 256 * 64 * 4  # of the embedding, and as many of the head
    assert larger.by_category["parameters"] - base.by_category["parameters"] == 2 * rows
    assert larger.optimizer_state_by_moment["nu"] - base.optimizer_state_by_moment["nu"] == 2 * rows
    assert changed(base, larger) == {"parameters", "optimizer_state", "gradients"}


def test_hardly_a_byte_is_without_an_owner(base):
    assert base.by_category.get("other", 0) < 0.03 * base.reserved_bytes
    unsure = sum(base.by_certainty.get(kind, 0) for kind in ("inherited", "fallback"))
    assert unsure < 0.15 * base.reserved_bytes
