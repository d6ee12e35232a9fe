"""Define low-rank adapters (LoRA) of a block's products.

An adapter of a product x W has A [inputs, rank] and B [rank, outputs], and adds x A B times a scale (Hu et
al. 2021, https://arxiv.org/abs/2106.09685). B begins as zeros, so that a run begins with the model's own
results. A begins as the model's matrices do; PEFT draws it from a uniform distribution instead, with a third
of the variance. Both are used in the compute format, and their products run in it also where the others are
in fp8.

Layouts: A has its product's inputs and B its outputs, each divided as the product's own matrix is. What lies
between, `rank` numbers for each token, is summed over `tensor` where the inputs are divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.config import LoraConfig, TransformerModel
from meshwright.trainer.models import RESIDUAL, Context, Parameter, Tree
from meshwright.trainer.models.products import ADAPTER, num_inputs_of, product
from meshwright.trainer.models.transformer import Transformer

from ._adapted_products import adapted_products


def adapter_declarations(model: Transformer, lora: LoraConfig) -> Tree:
    """Declare the adapters of a model's layers, a tree that `with_adapters` puts beside the parameters."""
    return {
        name: stack.of_layers(
            [_adapter_parameters(block.declared, model.config, lora) for block in stack.period]
        )
        for name, stack in model.stacks.items()
    }


def with_adapters(parameters: Tree, adapters: Tree) -> Tree:
    """Return parameters and adapters as one tree; the leaves of both are the same objects as before.

    >>> with_adapters({"layers": [{"query": 1}]}, {"layers": [{"query_adapter": {"a": 2}}]})
    {'layers': [{'query': 1, 'query_adapter': {'a': 2}}]}
    """
    if isinstance(parameters, list) and isinstance(adapters, list):
        return [with_adapters(*pair) for pair in zip(parameters, adapters, strict=True)]
    if not (isinstance(parameters, dict) and isinstance(adapters, dict)):
        raise AssertionError(f"an adapter lies where a parameter does: {parameters} and {adapters}")
    shared = {
        name: with_adapters(parameters[name], adapters[name]) for name in adapters if name in parameters
    }
    return {**parameters, **adapters, **shared}


def _adapter_parameters(
    block: Mapping[str, Mapping[str, Parameter]], model: TransformerModel, lora: LoraConfig
) -> dict[str, dict[str, dict[str, Parameter]]]:
    """Declare the adapters of one block, by group and by name of the product with `ADAPTER`."""
    assert lora.rank is not None, "the run has no adapters"
    declared: dict[str, dict[str, dict[str, Parameter]]] = {}
    for group, name in adapted_products(lora, model):
        if group not in block:  # of layers of another kind
            continue
        matrix = block[group][name]
        num_inputs = num_inputs_of(name)
        inputs, outputs = matrix.shape[:num_inputs], matrix.shape[num_inputs:]
        first = Parameter(
            shape=(*inputs, lora.rank), dims=(*matrix.dims[:num_inputs], "rank"), fan_in=math.prod(inputs)
        )
        second = Parameter(
            shape=(lora.rank, *outputs),
            dims=("rank", *matrix.dims[num_inputs:]),
            fan_in=lora.rank,
            initial="zeros",
        )
        declared.setdefault(group, {})[f"{name}{ADAPTER}"] = {"a": first, "b": second}
    return declared


def apply_adapter(
    x: Float[Array, "batch sequence *inputs"], adapter: dict[str, Array], matrix: Parameter, context: Context
) -> Array:
    """Return an adapter's contribution to a product of `x` [batch, sequence, inputs], sharded alike."""
    assert context.adapter_scale is not None, "the run has no adapters"
    num_inputs = x.ndim - 2
    inputs, outputs = matrix.dims[:num_inputs], matrix.dims[num_inputs:]
    # A residual is divided by position over `tensor`; inside a block, positions are whole.
    rows = RESIDUAL[:2] if outputs == ("embed",) else ("batch", "sequence")
    with jax.named_scope("adapter"):
        first = context.gather(adapter["a"], *inputs, "rank", adapter=True)
        second = context.gather(adapter["b"], "rank", *outputs, adapter=True)
        low = context.pin(product(x, first, num_inputs), *rows, "rank")
        y = product(low, second, 1)
        return context.pin(y * jnp.asarray(context.adapter_scale, y.dtype), *rows, *outputs)
