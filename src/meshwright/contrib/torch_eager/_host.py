"""Follow what a step keeps in the host's memory: the shards of FSDP2's `CPUOffloadPolicy`, and `save_on_cpu`.

The device of fake ranks is a CPU, where PyTorch's copies between host and device do nothing. So they are
made here: what comes to the device counts there, what goes to the host counts beside it. The result of an
operation is where its operands are, so an optimizer whose shards are on the host keeps its state there too.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from meshwright.errors import InputError

from ._watch import OFFLOADED, StorageWatch, inner_tensors

NO_TIME = "parts of the step are in the host's memory, and copies and the optimizer there are not predicted"


@contextlib.contextmanager
def pinning_nothing() -> Iterator[None]:
    """Let FSDP2 keep shards on the host without pinning them, for which PyTorch needs a GPU."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    kind: Any = FSDPParam
    kind.pin_memory = property(lambda self: False, lambda self, value: None)  # each object sets its own
    try:
        yield
    finally:
        del kind.pin_memory


def shards_on_host(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the local shards that a plan keeps in the host's memory."""
    from torch.distributed.fsdp import FSDPModule

    states: list[Any] = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
    groups = [group for state in states for group in _groups_of(state)]
    parameters = [each for group in groups for each in group.fsdp_params if each.offload_to_cpu]
    return [inner for each in parameters for inner in inner_tensors(each.sharded_param)]


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of one module that FSDP2 shards; PyTorch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@contextlib.contextmanager
def copying_to_host(watch: StorageWatch) -> Iterator[None]:
    """Make FSDP2's copies of offloaded shards and gradients, and those of `save_on_cpu`, in the block."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

    groups: Any = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
    parameter_kind: Any = FSDPParam
    offloads: Any = save_on_cpu
    gathers, reduce, init = parameter_kind.all_gather_inputs, groups.foreach_reduce, offloads.__init__

    def all_gather_inputs(self: Any) -> list[torch.Tensor]:
        if not self.offload_to_cpu or self.sharded_state != ShardedState.SHARDED:
            return gathers.fget(self)
        if hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise InputError(
                "shards in the host's memory (CPUOffloadPolicy) are gathered by a rule of their own tensors",
                hint="that is not counted: leave offload_policy out, or the tensors that convert themselves",
            )
        on_host = self._sharded_param_data
        self._sharded_param_data = watch.copied(on_host, to_host=False)
        try:
            return gathers.fget(self)
        finally:
            self._sharded_param_data = on_host

    def foreach_reduce(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        result = reduce(parameters, *args, **kwargs)
        for each in parameters:
            gradient = each.sharded_param.grad
            if each.offload_to_cpu and gradient is not None and not watch.is_on_host(gradient._local_tensor):
                gradient._local_tensor = watch.copied(gradient._local_tensor, to_host=True)
        return result

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        return watch.copied(tensor, to_host=True, category=OFFLOADED)

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        return watch.copied(tensor, to_host=False)

    def save(self: Any, *_: Any, **__: Any) -> None:
        saved_tensors_hooks.__init__(self, to_host, to_device)

    parameter_kind.all_gather_inputs = property(all_gather_inputs)
    groups.foreach_reduce, offloads.__init__ = foreach_reduce, save
    try:
        yield
    finally:
        parameter_kind.all_gather_inputs = gathers
        groups.foreach_reduce, offloads.__init__ = reduce, init
