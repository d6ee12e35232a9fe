"""Describe the state of a step: shapes, formats and shardings of parameters, moments and batches.

Matrices: optimizers that act on matrices act on those of single layers. Layers are stacked along their own
dim, and a matrix's inputs or outputs may span several dims (attention: embed, and heads x head_dim).
Moments have the sharding of their parameter, or of those of its dims that they keep.
Offload: optimizer state may be kept in host memory between steps. It is copied to the devices for the update
and back after it, so its bytes cross the host's link twice per step.
ZeRO-1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 5): parameters and moments are
sharded over `data` too, and each replica updates its part. Gradients are reduce-scattered over the replicas.
Parameters are all-gathered in the compute format when a step begins; the copy is dropped at its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..config import IdxData, RunConfig, TokenFileData
from ..models import Parameter
from ..sharding import activation_spec, batch_axes, parameter_spec

Tree = Any
STACKED = ("layers", "experts")  # dims that stack several parameters of one kind
OUTER = ("vocab", "positions", "one")  # dims of tables and heads, which are no hidden matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixDims:
    """The indices of a parameter's dims: those that stack matrices, then those of a matrix's two sides.

    A vector has one side, and `second` is empty. `inputs_first`: a product sums over `first`, not `second`.
    """

    stack: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...] = ()
    inputs_first: bool = True

    @property
    def sides(self) -> tuple[tuple[int, ...], ...]:
        """Groups of dims, each one dim of the flattened parameter: the stack's, then one or two sides."""
        return (*((place,) for place in self.stack), *(side for side in (self.first, self.second) if side))

    def flat_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` with the dims of each side merged into one."""
        return tuple(math.prod(shape[place] for place in side) for side in self.sides)

    def inputs_outputs(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of each matrix in a parameter of `shape`."""
        sides = [math.prod(shape[place] for place in side) for side in (self.first, self.second)]
        return (sides[0], sides[1]) if self.inputs_first else (sides[1], sides[0])


def is_parameter(leaf: object) -> bool:
    """Return whether `leaf` is a `Parameter`, a leaf of a model's declarations."""
    return isinstance(leaf, Parameter)


def is_matrix(parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix or a table, not a norm or a bias.

    The test is its random initialisation, since a bias may also have two dims (heads and head_dim).
    """
    return parameter.initial == "fan_in"


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix inside the model, not a table or a head."""
    return is_matrix(parameter) and not set(OUTER) & set(parameter.dims)


def matrix_dims(parameter: Parameter) -> MatrixDims:
    """Return the dims of a parameter's matrices, or of its vectors.

    A matrix's inputs are the leading or trailing dims (after the stack) whose sizes multiply to `fan_in`.
    """
    shape, places = parameter.shape, tuple(range(len(parameter.shape)))
    num_stacked = sum(dim in STACKED for dim in parameter.dims)
    assert set(parameter.dims[:num_stacked]) <= set(STACKED), f"{parameter.dims}: the stack is not first"
    stack, rest = places[:num_stacked], places[num_stacked:]
    if is_matrix(parameter):
        for inputs_first in (True, False):
            for cut in range(1, len(rest)):
                first, second = rest[:cut], rest[cut:]
                inputs = first if inputs_first else second
                if math.prod(shape[place] for place in inputs) == parameter.fan_in:
                    return MatrixDims(stack=stack, first=first, second=second, inputs_first=inputs_first)
        raise AssertionError(f"no dims of {parameter} have its fan_in")
    return MatrixDims(stack=stack, first=rest)


def muon_dims(parameter: Parameter) -> optax.contrib.MuonDimensionNumbers:
    """Return the input and output dims of a parameter's matrices, as Optax's Muon takes them."""
    dims = matrix_dims(parameter)
    inputs, outputs = (dims.first, dims.second) if dims.inputs_first else (dims.second, dims.first)
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


def by_matrix(update: optax.GradientTransformation, declared: Tree) -> optax.GradientTransformation:
    """Wrap `update` to see each layer's matrices and vectors as separate arrays of two dims or one.

    Its state has a part for each number of stacked dims. "single": none. "stacked": one leading dim, for the
    layers or for one layer's experts. "experts": two leading dims, for the layers and their experts.
    """
    dims = jax.tree.map(matrix_dims, declared, is_leaf=is_parameter)
    stacked = optax.GradientTransformation(jax.vmap(update.init), jax.vmap(update.update))
    twice = optax.GradientTransformation(jax.vmap(stacked.init), jax.vmap(stacked.update))
    parts = {"stacked": stacked, "single": update, "experts": twice}
    kinds = ("single", "stacked", "experts")

    def flat(tree: Tree) -> dict[str, Tree]:
        def part(name: str) -> Tree:
            def leaf(dims: MatrixDims, x: Any) -> Any:
                mine = kinds[len(dims.stack)] == name
                return x.reshape(dims.flat_shape(x.shape)) if mine else optax.MaskedNode()

            return jax.tree.map(leaf, dims, tree, is_leaf=lambda d: isinstance(d, MatrixDims))

        found = {name: part(name) for name in parts}
        return {name: tree for name, tree in found.items() if jax.tree.leaves(tree)}

    def init(params: Tree) -> Tree:
        return {name: parts[name].init(tree) for name, tree in flat(params).items()}

    def apply(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        gradients, values = flat(updates), flat(params)
        done = {name: parts[name].update(gradients[name], state[name], values[name]) for name in state}
        changes = [change for change, _ in done.values()]

        def whole(x: Any, *found: Any) -> Any:
            return next(y for y in found if not isinstance(y, optax.MaskedNode)).reshape(x.shape)

        return jax.tree.map(whole, updates, *changes), {name: new for name, (_, new) in done.items()}

    return optax.GradientTransformation(init, apply)


Shape = tuple[int, ...]


def moment_shardings(state: Tree, declared: Tree, mesh: Mesh, zero1: bool = False) -> Tree:
    """Return the shardings of an optimizer's state, given the state's shapes.

    An array whose path ends with a parameter's path is that parameter's moment. A moment of the parameter's
    shape has its sharding. A moment of its matrices' rows or columns is sharded as these are. Arrays that
    belong to no parameter (step counts) or keep none of its dims are replicated.
    """
    parameters = {
        jax.tree_util.keystr(path): parameter
        for path, parameter in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_parameter)
    }

    def sharding(path: tuple[Any, ...], moment: jax.ShapeDtypeStruct) -> NamedSharding:
        tails = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        found = next((tail for tail in tails if tail in parameters), None)
        if found is None:
            return NamedSharding(mesh, PartitionSpec())
        name = jax.tree_util.keystr(path).removesuffix(found).rpartition(".")[2]
        return NamedSharding(mesh, _spec(name, moment.shape, parameters[found], mesh, zero1))

    return jax.tree_util.tree_map_with_path(sharding, state)


def _spec(name: str, shape: Shape, parameter: Parameter, mesh: Mesh, zero1: bool) -> PartitionSpec:
    """Return the PartitionSpec of one moment."""
    whole = parameter_spec(parameter.dims, mesh, zero1)
    if shape == parameter.shape:
        return whole
    dims = matrix_dims(parameter)
    sides = _sides_kept(name, dims, parameter.shape)
    flat = tuple(
        size for side in sides for size in MatrixDims(stack=(), first=side).flat_shape(parameter.shape)
    )
    return PartitionSpec(*(_of_side(side, whole) for side in sides)) if flat == shape else PartitionSpec()


def _sides_kept(name: str, dims: MatrixDims, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the groups of dims that a moment has.

    Of a matrix's sides, Optax's Adafactor keeps the shorter in `v_row` and the longer in `v_col`. If they are
    equal, the second side counts as the longer.
    """
    if name not in ("v_row", "v_col") or not dims.second:
        return dims.sides
    first, second = dims.inputs_outputs(shape) if dims.inputs_first else dims.inputs_outputs(shape)[::-1]
    longer, shorter = (dims.first, dims.second) if first > second else (dims.second, dims.first)
    return (*((place,) for place in dims.stack), shorter if name == "v_row" else longer)


def _of_side(side: tuple[int, ...], whole: PartitionSpec) -> Any:
    """Return the axes that shard several merged dims, or None if a dim other than the first is sharded.

    Only the first dim's shards are contiguous in the merged dim.
    """
    axes, *others = (whole[place] for place in side)
    return axes if all(other is None for other in others) else None


HOST = "pinned_host"  # memory that devices access without the host's help


def kept_on_host(shardings: Tree, shapes: Tree) -> Tree:
    """Return `shardings` with the moments in host memory; counts (scalars) stay on the devices.

    Described devices, which are not present, list no memories and ignore the memory kind. There the placement
    follows from `to_host` within the step and from the donation of the state.
    """

    def one(sharding: NamedSharding, shape: jax.ShapeDtypeStruct) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if shape.ndim else sharding

    return jax.tree.map(one, shardings, shapes)


def to_device(optimizer: Tree) -> Tree:
    """Copy moments from host memory to the devices, within a step."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if x.ndim else x, optimizer)


def to_host(optimizer: Tree) -> Tree:
    """Copy moments to host memory, within a step."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, optimizer)


def whole_over_replicas(parameters: Tree, declared: Tree, mesh: Mesh, dtype: jax.typing.DTypeLike) -> Tree:
    """Gather the parameters over `data`: the copy that a ZeRO-1 step computes with, sharded by other axes.

    Matrices and tables are cast to `dtype` before they cross the network. Vectors stay in float32, and so do
    matrices with `Parameter.wide`.
    """

    def one(declared: Parameter, x: Array) -> Array:
        split, whole = (
            NamedSharding(mesh, parameter_spec(declared.dims, mesh, zero1)) for zero1 in (True, False)
        )
        cast = x.astype(dtype if is_matrix(declared) and not declared.wide else jnp.float32)
        # Without the inner constraint the partitioner gathers before it casts, which moves twice the bytes.
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(cast, split), whole)

    with jax.named_scope("gather_over_data"):
        return jax.tree.map(one, declared, parameters, is_leaf=is_parameter)


def abstract_state(
    init: Any, declared: Tree, mesh: Mesh, *, zero1: bool = False, on_host: bool = False
) -> Tree:
    """Return the state's shapes with their shardings; moments are sharded as their parameters.

    If `on_host`, moments are in the memory of their device's host.
    """
    shapes = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: replicated, shapes)
    shardings["parameters"] = jax.tree.map(
        lambda p: NamedSharding(mesh, parameter_spec(p.dims, mesh, zero1)), declared, is_leaf=is_parameter
    )
    shardings["optimizer"] = moment_shardings(shapes["optimizer"], declared, mesh, zero1)
    if on_host:
        shardings["optimizer"] = kept_on_host(shardings["optimizer"], shapes["optimizer"])
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def abstract_batch(config: RunConfig, mesh: Mesh) -> Tree:
    """Return the batch's shapes and shardings: [microbatches, rows, ...], rows sharded over the replicas."""
    assert config.batch.sequences_per_replica is None, "resolve the batch on its layout first"
    replicas = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    rows = config.batch.sequences
    if config.batch.microbatch_sequences is not None:
        rows = config.batch.microbatch_sequences * replicas
    num_microbatches = config.batch.sequences // rows

    def array(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, activation_spec(("microbatch", "batch"), mesh))
        return jax.ShapeDtypeStruct((num_microbatches, rows, *rest), dtype, sharding=sharding)

    model = config.model
    if model.takes == "sequences":
        tokens = array(jnp.int32, config.batch.sequence_length + 1)
        packed = isinstance(config.data, TokenFileData) and config.data.documents == "packed"
        return {"tokens": tokens, "segments": tokens} if packed else {"tokens": tokens}
    if model.takes == "images":
        images = {"images": array(jnp.float32, *model.sizes.input_shape), "labels": array(jnp.int32)}
        return {**images, "weights": array(jnp.float32)} if isinstance(config.data, IdxData) else images
    return {"inputs": array(jnp.float32, *model.sizes.input_shape), "targets": array(jnp.float32)}
