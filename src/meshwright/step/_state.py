"""Describe the state of a step: shapes, formats and shardings of parameters, moments and batches.

Which numbers of a parameter are a matrix: optimizers that treat matrices treat those of single layers.

Layers are stacked along a dim of their own, and a matrix's inputs or outputs may be several dims
(attention's: embed on one side, heads x head_dim on the other).

Where the optimizer's moments lie: with their parameter, or with the part of its dims that they keep.

Optimizer state that is kept in the hosts' memory between steps.

It is copied to the devices for the update and back after it, so its bytes cross the host's link twice a step.

ZeRO-1: parameters and moments are split over `data` too, and each replica updates its part of them.

Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054), section 5: the gradients are reduce-scattered over
the replicas, and the parameters gathered. Here they are gathered when a step begins, in the format of the
computation, and the copy is dropped at its end.

The step's abstract arguments: shapes, formats and shardings of the state and of a batch.
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

from ..config import IdxData, LeNetModel, LinearModel, ResNetModel, RunConfig, TokenFileData, TransformerModel
from ..models import Parameter
from ..sharding import activation_spec, batch_axes, parameter_spec

Tree = Any
STACKED = ("layers", "experts")  # dims that hold several parameters of one kind
OUTER = ("vocab", "positions", "one")  # tables and heads: no hidden matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixDims:
    """The dims of a parameter, by place: those that stack matrices, then those of a matrix's two sides.

    A vector has one side and `second` is empty. `inputs_first`: whether a product sums over `first`.
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
        """`shape` with the dims of each side as one."""
        return tuple(math.prod(shape[place] for place in side) for side in self.sides)

    def inputs_outputs(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many inputs and outputs each matrix of a parameter of `shape` has."""
        sides = [math.prod(shape[place] for place in side) for side in (self.first, self.second)]
        return (sides[0], sides[1]) if self.inputs_first else (sides[1], sides[0])


def is_parameter(leaf: object) -> bool:
    """Whether a leaf of a model's table of parameters is reached."""
    return isinstance(leaf, Parameter)


def is_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix or a table, no norm and no bias.

    What is drawn is a matrix: a bias may have two dims too, heads and their width.
    """
    return parameter.initial == "fan_in"


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix inside the model: no table, no head."""
    return is_matrix(parameter) and not set(OUTER) & set(parameter.dims)


def matrix_dims(parameter: Parameter) -> MatrixDims:
    """The dims of a parameter's matrices, or of its vectors.

    The inputs of a matrix are the dims, first or last, that have `fan_in` numbers.
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
    """What Optax's Muon must know: over which dims a product sums, and which it makes."""
    dims = matrix_dims(parameter)
    inputs, outputs = (dims.first, dims.second) if dims.inputs_first else (dims.second, dims.first)
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


def by_matrix(update: optax.GradientTransformation, declared: Tree) -> optax.GradientTransformation:
    """`update`, given each layer's matrices and vectors as arrays of their own, of two dims or one.

    Its state has a part for each number of stacked dims: "single"; "stacked", whose arrays have a leading dim
    for the layers (or a layer's experts); and "experts", with two, for layers and the experts of each.
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
    """The shardings of an optimizer's state of these shapes.

    An array below a parameter's own path is that parameter's moment. One of the parameter's shape lies
    where it lies; one of its matrices' rows or columns is split as those are. What belongs to no parameter
    (counts of steps) or keeps none of its dims is on every device.
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
    """How one moment lies."""
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
    """The groups of dims that a moment has: of a matrix's longer and shorter sides, Optax's Adafactor keeps
    the shorter one in `v_row` and the longer one in `v_col`; the second is longer where they are equal."""
    if name not in ("v_row", "v_col") or not dims.second:
        return dims.sides
    first, second = dims.inputs_outputs(shape) if dims.inputs_first else dims.inputs_outputs(shape)[::-1]
    longer, shorter = (dims.first, dims.second) if first > second else (dims.second, dims.first)
    return (*((place,) for place in dims.stack), shorter if name == "v_row" else longer)


def _of_side(side: tuple[int, ...], whole: PartitionSpec) -> Any:
    """The axes that split several dims made one: those of the first, for it alone lies in one piece."""
    axes, *others = (whole[place] for place in side)
    return axes if all(other is None for other in others) else None


HOST = "pinned_host"  # memory that devices read and write without the host's help


def kept_on_host(shardings: Tree, shapes: Tree) -> Tree:
    """`shardings` of optimizer state of these shapes, moments in host memory; counts stay on the devices.

    Devices that are only described list no memories, and make nothing of the name: there, what holds is
    where the step itself puts them (`to_host`) and that the state is donated.
    """

    def one(sharding: NamedSharding, shape: jax.ShapeDtypeStruct) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if shape.ndim else sharding

    return jax.tree.map(one, shardings, shapes)


def to_device(optimizer: Tree) -> Tree:
    """Within a step: moments that lie in host memory, copied to the devices."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if x.ndim else x, optimizer)


def to_host(optimizer: Tree) -> Tree:
    """Within a step: its moments, copied to host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, optimizer)


def whole_over_replicas(parameters: Tree, declared: Tree, mesh: Mesh, dtype: jax.typing.DTypeLike) -> Tree:
    """The copy of the parameters that a step computes with: whole along `data`, split by the other axes.

    Matrices and tables are cast to `dtype` before they cross the network; vectors stay in float32, and so
    do matrices that are used in it (`Parameter.wide`).
    """

    def one(declared: Parameter, x: Array) -> Array:
        split, whole = (
            NamedSharding(mesh, parameter_spec(declared.dims, mesh, zero1)) for zero1 in (True, False)
        )
        cast = x.astype(dtype if is_matrix(declared) and not declared.wide else jnp.float32)
        # Without the first the partitioner gathers before it casts, which is twice the bytes.
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(cast, split), whole)

    with jax.named_scope("gather_over_data"):
        return jax.tree.map(one, declared, parameters, is_leaf=is_parameter)


def abstract_state(
    init: Any, declared: Tree, mesh: Mesh, *, zero1: bool = False, on_host: bool = False
) -> Tree:
    """The state's shapes with their shardings; each moment lies where its parameter lies, in the memory of
    its device's host if `on_host`."""
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
    """The batch's shapes with their shardings: [microbatches, rows, ...], rows split over the replicas."""
    assert config.batch.sequences_per_replica is None, "settle the config on its layout first"
    replicas = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    rows = config.batch.sequences
    if config.batch.microbatch_sequences is not None:
        rows = config.batch.microbatch_sequences * replicas
    num_microbatches = config.batch.sequences // rows

    def array(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, activation_spec(("microbatch", "batch"), mesh))
        return jax.ShapeDtypeStruct((num_microbatches, rows, *rest), dtype, sharding=sharding)

    if isinstance(config.model, TransformerModel):
        tokens = array(jnp.int32, config.batch.sequence_length + 1)
        packed = isinstance(config.data, TokenFileData) and config.data.documents == "packed"
        return {"tokens": tokens, "segments": tokens} if packed else {"tokens": tokens}
    if isinstance(config.model, LeNetModel | ResNetModel):
        side = config.model.image_size
        images = {"images": array(jnp.float32, 1, side, side), "labels": array(jnp.int32)}
        return {**images, "weights": array(jnp.float32)} if isinstance(config.data, IdxData) else images
    width = config.model.input_dim if isinstance(config.model, LinearModel) else config.model.width
    return {"inputs": array(jnp.float32, width), "targets": array(jnp.float32)}
