"""Make a training step of an exported module, over the mesh axes `data` and `fsdp`.

Each device runs the module on its own inputs, as a rank of PyTorch does: the step is one `jax.shard_map`.
Parameters and the optimizer's state are split over `fsdp` along their largest dim that it divides. A block
gathers its parameters where it reads them, in its forward and again in its backward pass, and their
gradients are reduce-scattered, as with FSDP2. Over `data` gradients are summed. A parameter without such a
dim is whole on each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwright.errors import InputError
from meshwright.hardware import Chip
from meshwright.trainer.models import Context
from meshwright.trainer.models.attention import uses_cudnn
from meshwright.trainer.models.attention_blocks import cudnn_attention

from ._graph_runner import GraphRunner
from ._layers import Attention, plain_attention
from ._module_program import AS_WRITTEN, ArraySpec, ModuleProgram, segments_of
from ._repeats import repeats_of

FSDP, DATA = "fsdp", "data"
LEARNING_RATE = 1e-3  # no figure depends on it
OPTIMIZER_HINT = "give torch.optim.AdamW, Adam or SGD, or a function from parameters to one of them"
MOST_UNROLLED = 48  # blocks; a longer program takes minutes to compile
# fmt: off
ELEMENTWISE = (
    "abs", "add", "add_any", "ceil", "clamp", "concatenate", "copy", "cos", "custom_jvp_call", "div",
    "erf", "erf_inv", "erfc", "exp", "expand_dims", "expm1", "floor", "integer_pow", "log", "log1p",
    "logistic", "max", "min", "mul", "neg", "pad", "pow", "reduce_precision", "rev", "round", "rsqrt",
    "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh",
)
# fmt: on
MOVES = ("convert_element_type", "transpose", "broadcast_in_dim", "reshape", "squeeze", "slice", "split")
Tree = Any


@dataclass(frozen=True, kw_only=True)
class ModuleStep:
    """A training step of a program.

    Args:
        program: exported with the inputs of one device.
        mesh_axes: names and sizes, outermost first: of `data` and `fsdp`.
        optimizer: its update.
        attention: computes `scaled_dot_product_attention`.
        checkpoint: what runs again in the backward pass, one of `program.checkpoints`.
        loops: whether equal blocks that follow one another run as one loop. The state then holds each of
            their parameters as one stack. If None, they do with `fsdp`, where a loop needs less memory, and
            where there are very many.
    """

    program: ModuleProgram
    mesh_axes: tuple[tuple[str, int], ...]
    optimizer: optax.GradientTransformation
    attention: Attention = plain_attention
    checkpoint: str = AS_WRITTEN
    loops: bool | None = None

    def __post_init__(self) -> None:
        for axis, size in self.mesh_axes:
            if axis not in (FSDP, DATA) and size > 1:
                raise InputError(
                    f"a module as a JAX program is split over fsdp and data; the layout has {axis}={size}",
                    hint=f"layout='fsdp={self.num_devices}'",
                )

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return _product(size for _, size in self.mesh_axes)

    @cached_property
    def mesh(self) -> AbstractMesh:
        """The mesh, which needs no devices."""
        names = tuple(name for name, _ in self.mesh_axes)
        sizes = tuple(size for _, size in self.mesh_axes)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def split_dim(self, name: str) -> int | None:
        """Return the dim of a parameter that `fsdp` splits: the largest that it divides, or None."""
        shape, ways = self.program.parameters[name].shape, dict(self.mesh_axes).get(FSDP, 1)
        fitting = [dim for dim, size in enumerate(shape) if size and size % ways == 0]
        return max(fitting, key=lambda dim: shape[dim]) if ways > 1 and fitting else None

    @cached_property
    def has_loops(self) -> bool:
        """Return whether blocks run as a loop."""
        if self.loops is not None:
            return self.loops and self.num_looped > 0
        has_fsdp = dict(self.mesh_axes).get(FSDP, 1) > 1
        return self.num_looped > (0 if has_fsdp else MOST_UNROLLED)

    @cached_property
    def num_looped(self) -> int:
        """The number of equal blocks that loops run, or could."""
        repeats = repeats_of(self.program, segments_of(self.program, self.checkpoint))
        return sum(each.count for each in repeats)

    @cached_property
    def _runner(self) -> GraphRunner:
        return GraphRunner(
            program=self.program,
            attention=self.attention,
            use=self._gathered,
            keeps=self._keeps(),
            checkpoint=self.checkpoint,
            loops=self.has_loops,
        )

    @cached_property
    def _first(self) -> dict[str, str]:
        """Return the first parameter of each stack, and each one in no stack, by the state's names."""
        stacks = self._runner.stacks
        inside = {name for names in stacks.values() for name in names}
        alone = {name: name for name in self.program.parameters if name not in inside}
        return {stack: names[0] for stack, names in stacks.items()} | alone

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of what the optimizer updates, as the state holds it."""
        return frozenset(name for name, first in self._first.items() if first not in self.program.frozen)

    def stacked(self, parameters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return parameters, given by their names in the module, as the state holds them."""
        stacks = self._runner.stacks
        return {
            name: jnp.stack([parameters[each] for each in stacks[name]])
            if name in stacks
            else parameters[name]
            for name in self._first
        }

    def _spec(self, name: str) -> PartitionSpec:
        dim = self.split_dim(self._first[name])
        whole = [None] * (name in self._runner.stacks)
        return PartitionSpec() if dim is None else PartitionSpec(*whole, *[None] * dim, FSDP)

    def _stored(self, name: str) -> ArraySpec:
        first, stacks = self._first[name], self._runner.stacks
        shape = self.program.parameters[first].shape
        count = (len(stacks[name]),) if name in stacks else ()
        return ArraySpec(shape=(*count, *shape), dtype=self.program.stored[first])

    def arguments(self) -> tuple[Tree, Tree, Any]:
        """Return the shapes of the state, the batch of all devices, and the key; with their shardings."""
        specs, shapes = self._state_specs, self._state_shapes()
        state = jax.tree.map(self._on_mesh, shapes, specs)
        batch = {name: self._whole(each) for name, each in self.program.inputs.items()}
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.program.is_random else None
        return state, batch, key

    @property
    def state_bytes(self) -> int:
        """The bytes of one device between steps: parameters that the loss reads, and optimizer state."""
        state, read = self.arguments()[0], self.program.read_parameters
        parameters = {name: x for name, x in state["parameters"].items() if self._first[name] in read}
        leaves = jax.tree.leaves((parameters, state["optimizer"]))
        return sum(math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in leaves)

    def _on_mesh(self, shape: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    def _whole(self, each: ArraySpec) -> jax.ShapeDtypeStruct:
        """Return an input for all devices, concatenated along the first dim."""
        one = each.described()
        if not one.shape:
            return self._on_mesh(one, PartitionSpec())
        whole = jax.ShapeDtypeStruct((one.shape[0] * self.num_devices, *one.shape[1:]), one.dtype)
        return self._on_mesh(whole, self._batch_spec)

    @cached_property
    def _batch_spec(self) -> PartitionSpec:
        return PartitionSpec(tuple(name for name, _ in self.mesh_axes))

    def _state_shapes(self) -> Tree:
        parameters = {name: self._stored(name).described() for name in self._first}
        trained = {name: shape for name, shape in parameters.items() if name in self.trained}
        buffers = {name: each.described() for name, each in self.program.buffers.items()}
        return {
            "parameters": parameters,
            "optimizer": jax.eval_shape(self.optimizer.init, trained),
            "buffers": buffers,
        }

    @cached_property
    def _state_specs(self) -> Tree:
        """Return the PartitionSpecs of the state: the optimizer's moments lie as their parameters."""
        shapes = self._state_shapes()
        parameters = {name: self._spec(name) for name in shapes["parameters"]}
        whole = PartitionSpec()

        def of_moment(keys: Any, leaf: Any) -> PartitionSpec:
            name = next((key.key for key in keys if isinstance(getattr(key, "key", None), str)), None)
            is_moment = name in parameters and leaf.shape == shapes["parameters"][name].shape
            return parameters[name] if is_moment else whole

        return {
            "parameters": parameters,
            "optimizer": jax.tree_util.tree_map_with_path(of_moment, shapes["optimizer"]),
            "buffers": dict.fromkeys(shapes["buffers"], whole),
        }

    def function(self) -> Any:
        """Return the jitted step: of (state, batch, key) to (state, loss)."""
        batch = {
            name: self._batch_spec if each.shape else PartitionSpec()
            for name, each in self.program.inputs.items()
        }
        specs = self._state_specs
        whole = PartitionSpec()

        def train_step(state: Tree, batch: Tree, key: Any) -> tuple[Tree, Any]:
            return self._local(state, batch, key)

        if self.num_devices > 1:
            train_step = jax.shard_map(
                train_step,
                mesh=self.mesh,
                in_specs=(specs, batch, whole),
                out_specs=(specs, whole),
                check_vma=False,
            )

        def step(state: Tree, batch: Tree, key: Any) -> tuple[Tree, Any]:
            return train_step(state, batch, key)

        return jax.jit(step, donate_argnums=0)

    def _local(self, state: Tree, batch: Tree, key: Any) -> tuple[Tree, Any]:
        """Run the step of one device on its shards."""
        axes = tuple(name for name, size in self.mesh_axes if size > 1)
        if key is not None and axes:
            key = jax.random.fold_in(key, lax.axis_index(axes))
        trained = {name: x for name, x in state["parameters"].items() if name in self.trained}
        frozen = {name: x for name, x in state["parameters"].items() if name not in trained}

        def loss(trained: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            value, buffers = self._runner.loss({**frozen, **trained}, state["buffers"], batch, key)
            return value / self.num_devices, buffers  # the mean over the devices

        (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        gradients = {name: self._summed(name, each) for name, each in gradients.items()}
        with jax.named_scope("optimizer"):
            updates, moments = self.optimizer.update(gradients, state["optimizer"], trained)
            after: Any = optax.apply_updates(trained, updates)
        if axes:
            value = lax.psum(value, axes)
            buffers = {
                name: lax.pmean(x, axes) if name in self.program.updates and _is_real(x) else x
                for name, x in buffers.items()
            }
        return {"parameters": {**frozen, **after}, "optimizer": moments, "buffers": buffers}, value

    def _gathered(self, name: str, shard: jax.Array) -> jax.Array:
        """Return a parameter whole and in the format of its use; its gradient takes the reverse path."""
        cast = shard.astype(self.program.parameters[name].described().dtype)
        dim = self.split_dim(name)
        return cast if dim is None else lax.all_gather(cast, FSDP, axis=dim, tiled=True)

    def _keeps(self) -> Callable[..., bool] | None:
        """Return a policy for `jax.checkpoint` of what a block keeps; None for what XLA chooses.

        Gathered parameters are gathered again. What is made of others element by element, or only moved, is
        made again by the kernels that read it: a checkpoint would have XLA write and read it. Results of
        products, attention, sums, comparisons and random numbers are kept.
        """
        if not self.has_loops and not any(
            self.split_dim(name) is not None for name in self.program.parameters
        ):
            return None
        again = {"all_gather", *ELEMENTWISE, *MOVES}
        return lambda primitive, *_, **__: primitive.name not in again

    def _summed(self, name: str, gradient: jax.Array) -> jax.Array:
        """Return a gradient summed over the axes along which it was not yet."""
        done = () if self.split_dim(self._first[name]) is None else (FSDP,)
        axes = tuple(axis for axis, size in self.mesh_axes if size > 1 and axis not in done)
        return lax.psum(gradient, axes) if axes else gradient


def _is_real(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def attention_on(chip: Chip, simulated: bool = False) -> Attention:
    """Return the attention for a chip: cuDNN's flash kernel if it applies, else plain JAX.

    cuDNN's takes half precision without a mask, with as many queries as keys if it is causal.
    """
    platform = "cpu" if simulated else chip.platform
    capability = chip.target.compute_capability if chip.target else (0, 0)

    def attention(
        query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, causal: bool, scale: float
    ) -> jax.Array:
        context = Context(
            mesh=jax.sharding.get_abstract_mesh(),
            dtype=query.dtype,
            platform=platform,
            compute_capability=capability,
            remat="none",
        )
        alike = query.dtype == key.dtype == value.dtype
        square = query.shape[1] == key.shape[1]
        fits = mask is None and alike and (square or not causal)
        if not fits or not uses_cudnn(context, query.shape[-1], value.shape[-1]):
            return plain_attention(query, key, value, mask=mask, causal=causal, scale=scale)
        return cudnn_attention(query, key, value, None, None, causal=causal, scale=scale, partitioned=False)

    return attention


def name_and_options(optimizer: Any) -> tuple[str, dict[str, Any]]:
    """Return the class of the optimizer that `optimizer` makes, by name, and its options; AdamW for None.

    It is called with a matrix and a vector, or with the matrix alone if that fails (Muon takes no vectors).
    Of several groups of parameters, the options of the first are returned.

    Args:
        optimizer: a class of `torch.optim`, or a function from parameters to an optimizer.

    Raises:
        InputError: both calls fail, or make no optimizer.
    """
    if optimizer is None:
        return "AdamW", {}
    import torch

    matrix, vector = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,)))
    called, made, failed = getattr(optimizer, "__name__", type(optimizer).__name__), None, None
    for parameters in ([matrix, vector], [matrix]):
        try:
            made = optimizer(parameters)
            break
        except Exception as error:  # the user's code
            failed = error
    if made is None and failed is not None:
        what = f"the optimizer {called} failed when it was called with parameters: {failed}"
        raise InputError(what, hint=OPTIMIZER_HINT) from failed
    if not isinstance(made, torch.optim.Optimizer):
        what = f"the optimizer {called} makes a {type(made).__name__}, not an optimizer of PyTorch"
        raise InputError(what, hint=OPTIMIZER_HINT)
    kind = type(made)
    is_pytorchs = kind.__module__.partition(".")[0] == "torch"
    name = kind.__name__ if is_pytorchs else f"{kind.__module__}.{kind.__qualname__}"
    options = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    return name, {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def optimizer_named(name: str, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """Return Optax's optimizer for a class of `torch.optim` by its name, with its options.

    Raises:
        InputError: there is none.
    """
    rate = options.get("lr", LEARNING_RATE)
    decay = options.get("weight_decay", 0.01 if name == "AdamW" else 0.0)
    odd = [option for option in ("amsgrad", "dampening", "maximize") if options.get(option)]
    if name in ("AdamW", "Adam") and not odd:
        (first, second), eps = options.get("betas", (0.9, 0.999)), options.get("eps", 1e-8)
        if name == "AdamW" or options.get("decoupled_weight_decay"):
            return optax.adamw(rate, first, second, eps, weight_decay=decay)
        adam = optax.adam(rate, first, second, eps)
        return optax.chain(optax.add_decayed_weights(decay), adam) if decay else adam
    if name == "SGD" and not odd:
        momentum = options.get("momentum") or None
        sgd = optax.sgd(rate, momentum, bool(options.get("nesterov")))
        return optax.chain(optax.add_decayed_weights(decay), sgd) if decay else sgd
    raise InputError(
        f"the optimizer {name}{' with ' + odd[0] if odd else ''} has no counterpart here for a module as a "
        "JAX program",
        hint=OPTIMIZER_HINT,
    )
