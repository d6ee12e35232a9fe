"""Make a mesh of ranks that do not exist, spread a module over it, and watch what FSDP gathers.

The process group is PyTorch's "fake" one: its collectives return at once and move nothing. The mesh's device
is the CPU, for which PyTorch needs no driver; `_attention_kernels` chooses the kernels of the target.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.contrib.jax_steps import USERS_FAILURES
from meshwright.errors import InputError
from meshwright.hlo import Axes

from ._default_plan import OWN_AXES, default_plan
from ._fakes import explain_failure
from ._watch import Storages, StorageWatch, inner_tensors

GATHERED, UNSHARDED = "gathered parameters", "unsharded gradients"
LIMIT, FIRST_LIMIT, REBUILT_LIMITS = 2, 6, 9  # among the arguments of DDP's `Reducer` after the buckets
STAGES = "pipelines are not accounted: give the module of one stage, with the inputs of that stage"
_WORLDS = itertools.count(1)
Plan = Callable[[torch.nn.Module, DeviceMesh], Any]


@contextlib.contextmanager
def fake_world(axes: Axes, rank: int) -> Iterator[DeviceMesh]:
    """Make this process one rank of a mesh without the others, for the block.

    Raises:
        InputError: this process is a rank of a real process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    if dist.is_initialized():
        raise InputError(
            "torch.distributed is initialised in this process, and the account needs ranks of its own",
            hint="name a function that returns the module, package.module:function: it runs apart",
        )
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    excepthook = sys.excepthook  # PyTorch puts the rank before every line of a later traceback
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    try:
        with _answering_ddp(), _meshes_of_their_own(), _shards_when_asked(), _streams_of_the_cpu():
            yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


@contextlib.contextmanager
def _meshes_of_their_own() -> Iterator[None]:
    """Make the block's meshes differ from equal ones of other blocks.

    DTensor caches how to redistribute by meshes that are equal, also those of an earlier rank, whose groups
    are gone. Meshes of other threads differ, so each block numbers its own.
    """
    original, number = DeviceMesh.__init__, next(_WORLDS)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._thread_id, self._hash = number, None

    DeviceMesh.__init__ = init
    try:
        yield
    finally:
        DeviceMesh.__init__ = original


@contextlib.contextmanager
def refusing_pipelines() -> Iterator[None]:
    """Refuse schedules of pipelines that a plan has made: they ask other ranks for what these send."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    kinds = [getattr(schedules, f"PipelineSchedule{kind}") for kind in ("Single", "Multi") if schedules]
    originals = [kind.step for kind in kinds]

    def step(self: Any, *_: Any, **__: Any) -> Any:
        raise InputError(f"the module runs {type(self).__name__}, a schedule of a pipeline", hint=STAGES)

    for kind in kinds:
        kind.step = step
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.step = original


@contextlib.contextmanager
def _answering_ddp() -> Iterator[None]:
    """Give DDP the buckets of a step after the first, and hand it what it reduces.

    In its first step DDP has one bucket. It then fills buckets in the order in which the gradients came, for
    which the order of the parameters, reversed, stands here. The fake group's futures hold no result.
    """
    distributed: Any = sys.modules["torch.distributed"]
    kind = torch.nn.parallel.DistributedDataParallel
    original, make = kind.__init__, distributed.Reducer

    def reducer(parameters: Any, _: Any, __: Any, *others: Any) -> Any:
        limits = others[REBUILT_LIMITS] if len(others) > REBUILT_LIMITS and others[REBUILT_LIMITS] else None
        limits = limits or [others[FIRST_LIMIT], others[LIMIT]]
        order = list(range(len(parameters)))[::-1]
        buckets, sizes = distributed._compute_bucket_assignment_by_size(parameters[::-1], limits, [], order)
        with parameters[0].fake_mode:  # its buckets are as large as the model
            return make(parameters, buckets, sizes, *others)

    def reduce(group, bucket):  # DDP refuses annotations that are text
        buffer = bucket.buffer()
        dist.all_reduce(buffer, group=group, async_op=True)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_comm_hook(self.process_group, reduce)

    kind.__init__, distributed.Reducer = init, reducer
    try:
        yield
    finally:
        kind.__init__, distributed.Reducer = original, make


class _Shards(Sequence[torch.Tensor]):
    """The parts of a tensor that `torch.chunk` makes, each made when it is asked for; then empty ones."""

    def __init__(self, tensor: torch.Tensor, num_shards: int, dim: int) -> None:
        self._tensor, self._num_shards, self._dim = tensor, num_shards, dim
        self._length = math.ceil(tensor.size(dim) / num_shards)

    def __len__(self) -> int:
        return self._num_shards

    def __getitem__(self, place: Any) -> Any:
        start, end = place * self._length, self._tensor.size(self._dim)
        if start >= end > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, end - start))


@contextlib.contextmanager
def _shards_when_asked() -> Iterator[None]:
    """Let FSDP2 make the shards that it reads, which are two of each parameter, and not those of every rank.

    It makes one for each rank to read the first and its own. With 512 ranks these fake tensors took most of
    the time of an account.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    parameters: Any = _fsdp_param
    original = parameters._chunk_with_empty
    parameters._chunk_with_empty = _Shards
    try:
        yield
    finally:
        parameters._chunk_with_empty = original


@contextlib.contextmanager
def _streams_of_the_cpu() -> Iterator[None]:
    """Give FSDP2 the mesh's stream where it asks for the accelerator's, which there need not be.

    It does so for a gather that no backward pass uses: of a block below which everything is frozen.
    """
    accelerator: Any = sys.modules["torch.accelerator"]
    original = accelerator.current_stream
    accelerator.current_stream = lambda device=None: torch.cpu.current_stream()
    try:
        yield
    finally:
        accelerator.current_stream = original


def spread(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    parallelize: Plan | None,
    note: Callable[[str], None],
) -> torch.nn.Module:
    """Return the module after the user's `parallelize`, or after the default plan of the mesh's axes.

    `note` is called with a sentence on what the default plan does beside its usual units.

    Raises:
        InputError: `parallelize` fails or returns something else, or an axis needs one.
    """
    if parallelize is None:
        return default_plan(module, mesh, note)
    paths = {id(child): path for path, child in module.named_modules()}
    try:
        made = parallelize(module, mesh)
    except InputError:
        raise
    except USERS_FAILURES as failed:
        hint = "it is called with the module and a mesh whose axes are those of the layout: "
        hint += ", ".join(mesh.mesh_dim_names or ())
        raise explain_failure(failed, "parallelize", paths, hint) from failed
    if made is None:
        return module
    if not isinstance(made, torch.nn.Module):
        hint = "return the module, or nothing if it changes the one that it is given"
        if type(made).__module__.startswith("torch.distributed.pipelining"):
            hint = STAGES
        raise InputError(f"parallelize returned a {type(made).__name__}, not a module", hint=hint)
    return made


def check_plan(axes: Axes, parallelize: object) -> None:
    """Raise if an axis needs a plan and there is none, or the plan cannot be called with a module and a mesh.

    Raises:
        InputError: the message says which.
    """
    if parallelize is None:
        if foreign := [name for name, size in axes if size > 1 and name not in OWN_AXES]:
            raise InputError(
                f"how to split the module over {' and '.join(foreign)} is not known",
                hint="give parallelize=f, a function of the module and the mesh; without one, "
                "layouts have the axes fsdp and data",
            )
        split = [name for name, size in axes if size > 1]
        if split == ["fsdp", "data"]:
            sizes = dict(axes)
            raise InputError(
                "replicas of FSDP2's shards lie outside of them, and the layout has fsdp outside",
                hint=f"write data={sizes['data']},fsdp={sizes['fsdp']}",
            )
        return
    if not callable(parallelize):
        raise InputError(
            f"parallelize is a {type(parallelize).__name__}, not callable",
            hint="give a function of the module and the mesh",
        )
    try:
        inspect.signature(parallelize).bind(None, None)
    except TypeError as wrong:
        raise InputError(
            f"parallelize cannot be called with a module and a mesh: {wrong}", hint="def f(module, mesh): ..."
        ) from wrong
    except ValueError:  # a callable without a signature
        return


def is_even(module: torch.nn.Module) -> bool:
    """Return True if every parameter has shards of one size on all ranks."""
    from torch.distributed.tensor import DTensor, Shard

    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            continue
        sizes = list(parameter.shape)
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                if sizes[placement.dim] % parameter.device_mesh.size(axis):
                    return False
                sizes[placement.dim] //= parameter.device_mesh.size(axis)
    return True


@contextlib.contextmanager
def holding_loss_parallel() -> Iterator[None]:
    """Let a `loss_parallel` that the plan, the module or the loss enters last until the block ends.

    PyTorch asks for the backward pass within it, where a training loop calls it. DTensor's own table of
    operations is then as before.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss

    handlers = DTensor._op_dispatcher._custom_op_handlers
    before, original = dict(handlers), loss._disable_custom_loss_ops
    loss._disable_custom_loss_ops = lambda: None
    try:
        yield
    finally:
        loss._disable_custom_loss_ops = original
        handlers.clear()
        handlers.update(before)


@contextlib.contextmanager
def watching_dtensors(watch: StorageWatch) -> Iterator[None]:
    """Let the watch look away while DTensor runs an operation on the whole shapes, to learn the result's."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, op_schema: Any) -> Any:
        watch.looks_away, before = True, watch.looks_away
        try:
            return original(self, op_schema)
        finally:
            watch.looks_away = before

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original


@contextlib.contextmanager
def watching_fsdp(storages: Storages) -> Iterator[None]:
    """Give the parameters that FSDP2 gathers, and their gradients before they are reduced, their categories.

    FSDP2 holds both outside the module's parameters. It makes them in `FSDPParam.init_unsharded_param`.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    original = FSDPParam.init_unsharded_param

    def note_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            for tensor in inner_tensors(parameter.grad):
                storages.put(tensor, UNSHARDED)

    def init_unsharded_param(self: Any) -> None:
        is_first = not hasattr(self, "_unsharded_param")
        original(self)
        if is_first:
            for tensor in (*self.all_gather_outputs, *self._unsharded_inner_tensors):
                storages.put(tensor, GATHERED)
            if self._unsharded_param.requires_grad:
                self._unsharded_param.register_post_accumulate_grad_hook(note_gradient)

    FSDPParam.init_unsharded_param = init_unsharded_param
    try:
        yield
    finally:
        FSDPParam.init_unsharded_param = original
