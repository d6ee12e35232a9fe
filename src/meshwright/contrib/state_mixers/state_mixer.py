"""Run what mixers with states share: the short convolution, the scan on each device, and the checkpoint.

Queries, keys and values pass a causal convolution and silu, and a mixer makes the scan's steps from them.

Saved for the backward pass: the results of the projections, and what heads read (`attention.NAME`). The
convolutions, the scan and its states, one [key_dim, value_dim] for every chunk of tokens, are computed again
for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from meshwright.config import TransformerModel
from meshwright.sharding import activation_spec, on_each_device, ring_size
from meshwright.trainer.models import Context, Parameter
from meshwright.trainer.models.attention import HEADS, NAME, Documents

from .chunked_scan import Steps, chunked_scan
from .pieces import from_pieces, in_pieces, short_convolution

CHANNELS = ("query", "key", "value")
"""The products whose results pass a convolution."""
TAPS = "_taps"
"""Ends the name of a convolution's weights, after that of its product."""
Arrays = dict[str, Array]
StepsOf = Callable[[Arrays, Arrays], tuple[Steps, Array | None]]


def with_convolutions(declared: dict[str, Parameter], config: TransformerModel) -> dict[str, Parameter]:
    """Return the declarations of a mixer with those of its convolutions."""
    assert config.conv_width is not None, "the configuration is checked"
    for name in CHANNELS:
        shape, dims = declared[name].shape[1:], declared[name].dims[1:]
        taps = {"shape": (*shape, config.conv_width), "dims": (*dims, "width"), "fan_in": config.conv_width}
        declared[f"{name}{TAPS}"] = Parameter(**taps, wide=True)
        if config.conv_bias:
            declared[f"{name}{TAPS}_bias"] = Parameter(shape=shape, dims=dims, initial="zeros", wide=True)
    return declared


def mixed(
    inputs: Arrays,
    layer: Mapping[str, Any],
    declared: Mapping[str, Parameter],
    steps_of: StepsOf,
    normed: Callable[[Array, Array, Array], Array],
    config: TransformerModel,
    context: Context,
    documents: Documents | None,
) -> Float[Array, "batch sequence heads value_dim"]:
    """Return what heads read of their states, after `normed`, in the compute format.

    Args:
        inputs: the results of products, by the names of their matrices; `output_gate` is for `normed`.
        layer: the parameters of one layer.
        declared: their declarations.
        steps_of: makes the scan's steps on each device, from the inputs after convolutions and the wide
            parameters; and what is added to what heads read, None for nothing.
        normed: applies the gated norm to what heads read, with its scale and the gate.
        config: of the model.
        context: of the run.
        documents: of windows that hold several.
    """
    size, mesh = ring_size(context.mesh), context.mesh
    vectors = {
        name: context.gather(layer[name], *parameter.dims, wide=True)
        for name, parameter in declared.items()
        if parameter.wide
    }
    scale, gate = vectors.pop("norm"), inputs.pop("output_gate")
    places = None if documents is None else documents.positions

    def local(inputs: Arrays, vectors: Arrays, places: Array | None) -> Array:
        inputs, places = in_pieces((inputs, places), size)
        steps, added = steps_of(inputs | _convolved(inputs, vectors, places, size), vectors)
        begins = None if places is None else places == 0
        read = chunked_scan(steps, begins, config.scan_chunk, size)
        read = read if added is None else (read + added).astype(read.dtype)
        return from_pieces(read, size)

    def whole(inputs: Arrays, vectors: Arrays, scale: Array, gate: Array) -> Array:
        tokens = activation_spec(("batch", "sequence"), mesh)
        of_inputs = {
            name: activation_spec(("batch", "sequence", *declared[name].dims[1:]), mesh) for name in inputs
        }
        of_vectors = {name: activation_spec(declared[name].dims, mesh) for name in vectors}
        of_places = tokens if places is not None else PartitionSpec()
        with jax.named_scope("chunked_scan"), jax.named_scope("states"):
            each = on_each_device(
                local, mesh, (of_inputs, of_vectors, of_places), activation_spec(HEADS, mesh)
            )
            read = checkpoint_name(each(inputs, vectors, places), NAME)
        with jax.named_scope("output_norm"):
            return normed(read, scale, gate)

    kept = jax.checkpoint_policies.save_only_these_names(NAME)
    return context.pin(jax.checkpoint(whole, policy=kept)(inputs, vectors, scale, gate), *HEADS)


def _convolved(inputs: Arrays, vectors: Arrays, places: Array | None, size: int) -> Arrays:
    """Return queries, keys and values after the convolution and silu, in float32."""
    found = Arrays()
    for name in CHANNELS:
        x = short_convolution(inputs[name], vectors[f"{name}{TAPS}"], places, size)
        if (bias := vectors.get(f"{name}{TAPS}_bias")) is not None:
            x = x + bias[None, None]
        found[name] = jax.nn.silu(x)
    return found
