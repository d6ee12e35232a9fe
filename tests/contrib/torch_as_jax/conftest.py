from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def compared(module: Any, *inputs: Any, loss: Any = None, **keywords: Any) -> tuple[float, float]:
    """Return how far JAX is from PyTorch: the loss, relative, and gradients relative to the largest one.

    PyTorch runs second, since a run changes running means.
    """
    import meshwright as mw

    found = mw.module_as_jax(module, *inputs, loss=loss, **keywords)
    parameters, buffers = found.arrays_of(module)
    values = {f"args[{place}]": value for place, value in enumerate(inputs)} | keywords
    batch = {name: jnp.asarray(values[name].numpy(), told.dtype) for name, told in found.inputs.items()}
    run = jax.jit(jax.value_and_grad(found.loss, has_aux=True))
    (value, after), gradients = run(parameters, buffers, batch)
    output = module(*inputs, **keywords)
    theirs_loss = loss(output) if loss else getattr(output, "loss", output)
    theirs_loss.backward()
    theirs = {name: each.grad for name, each in module.named_parameters()}
    largest = max(float(each.abs().max()) for each in theirs.values() if each is not None)
    assert largest > 0
    assert gradients.keys() == {
        name for name, each in theirs.items() if each is not None or name in gradients
    }
    far = max(
        float(np.abs(np.asarray(gradients[name]) - (0 if each is None else each.numpy())).max())
        for name, each in theirs.items()
        if name in gradients
    )
    for name, buffer in module.named_buffers():
        if name in after:
            np.testing.assert_allclose(np.asarray(after[name]), buffer.numpy(), rtol=1e-5, atol=1e-6)
    return abs(float(value) / theirs_loss.item() - 1), far / largest


@pytest.fixture(name="compared")
def _compared() -> Callable[..., tuple[float, float]]:
    return compared
