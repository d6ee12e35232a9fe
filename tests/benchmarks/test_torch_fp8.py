import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.trainer.models.eight_bits import fp8_product as our_product

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _torch_fp8 import fp8_product, has_scaled_products  # noqa: E402


@pytest.mark.skipif(not has_scaled_products(), reason="this PyTorch has no scaled products")
def test_products_and_gradients_are_ours():
    random = np.random.default_rng(0)
    x, weight, pull = (random.normal(size=s).astype(np.float32) for s in ((2, 16, 32), (48, 32), (2, 16, 48)))
    linear = torch.nn.Linear(32, 48)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
    theirs_x = torch.from_numpy(x).requires_grad_()
    theirs = fp8_product(theirs_x, linear)
    theirs.backward(torch.from_numpy(pull).to(torch.bfloat16))

    half = [jnp.asarray(a, jnp.bfloat16) for a in (x.reshape(32, 32), weight.T, pull.reshape(32, 48))]
    ours, back = jax.vjp(lambda a, b: our_product(a, b, 1, True), *half[:2])
    d_x, d_weight = back(half[2])
    bias = linear.bias.detach().to(torch.bfloat16).float().numpy()
    found = (theirs.detach().float().numpy().reshape(32, 48) - bias, theirs_x.grad.numpy().reshape(32, 32))
    for ours_, theirs_ in zip((ours, d_x, d_weight), (*found, linear.weight.grad.numpy().T), strict=True):
        # Two roundings to bfloat16 at the most lie between them, of the largest of the product.
        difference = np.abs(np.asarray(ours_, np.float32) - theirs_).max()
        assert difference <= np.abs(theirs_).max() * 2**-7
