import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.vision import judged

LOGITS = np.array([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 5.0]], "float32")
LABELS = np.array([0, 0, 0, 2], "int32")  # right, wrong, right (the first of equals), right


def by_hand(rows):
    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    return -np.log([shares[row, LABELS[row]] for row in rows]).mean()


def test_loss_and_accuracy_are_means_over_the_rows():
    loss, metrics = judged(jnp.asarray(LOGITS), {"labels": jnp.asarray(LABELS)})
    assert float(loss) == pytest.approx(by_hand(range(4)), rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == {"accuracy": 0.75}


def test_rows_of_weight_zero_do_not_count():
    batch = {"labels": jnp.asarray(LABELS), "weights": jnp.array([2.0, 2.0, 0.0, 0.0])}
    loss, metrics = judged(jnp.asarray(LOGITS), batch)
    assert float(loss) == pytest.approx(by_hand(range(2)), rel=1e-6)
    assert float(metrics["accuracy"]) == 0.5
