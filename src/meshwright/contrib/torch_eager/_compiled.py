"""Run modules that `torch.compile` compiles as Inductor's kernels, for the memory of a step.

A region is one module, called with the tensors that it is given. AOTAutograd traces its forward and backward
pass together, Inductor plans both (`_inductor`), and what runs under the watch are the plans: each kernel's
buffers are made, taken over and freed as the plan says, and nothing else. Autograd keeps what the partitioner
decided to save.
Not modelled, so weighed as written, with the reason: checkpoints and sharded parameters inside a region, a
branch that depends on data, functions that are compiled by themselves.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._functorch.aot_autograd import aot_function
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ._inductor import Allocation, CompiledPlan, NotModelledError, Output, partition, plan_of
from ._watch import StorageWatch, is_wrapper

LONGEST = 200  # of a failure's words


@contextlib.contextmanager
def compiled_regions(regions: Sequence[torch.nn.Module], watch: StorageWatch, mode: Any) -> Iterator[None]:
    """Run the forward pass of each of the modules as Inductor compiles it, in the block."""
    before: list[tuple[torch.nn.Module, Any]] = []
    plans: dict[Any, CompiledPlan] = {}  # equal blocks have one
    for module in regions:
        before.append((module, vars(module).get("forward")))
        module.forward = _Region(module, watch, mode, plans)
    try:
        yield
    finally:
        for module, own in before:
            del module.forward
            if own is not None:
                module.forward = own


class _Region:
    """A compiled module: called, it runs its plans. One for each set of shapes that it is called with."""

    def __init__(
        self,
        module: torch.nn.Module,
        watch: StorageWatch,
        mode: FakeTensorMode,
        plans: dict[Any, CompiledPlan],
    ) -> None:
        self._module, self._watch, self._mode, self._plans = module, watch, mode, plans
        self._forward: Callable[..., Any] = module.forward
        self._known: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        if any(is_wrapper(type(tensor)) for tensor in state.values()):
            raise NotModelledError("parameters of a compiled part are spread by DTensor")
        leaves, shape = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if any(is_wrapper(type(leaves[place])) for place in places):
            raise NotModelledError("inputs of a compiled part are spread by DTensor")
        given = [leaves[place] for place in places]
        key = (
            torch.is_grad_enabled(),
            self._module.training,
            str(shape),
            tuple(map(_described, given)),
            tuple(tensor.requires_grad for tensor in state.values()),
        )
        if key not in self._known:
            self._known[key] = self._traced(state, leaves, shape, places, given)
        lifted = [getattr(owner, name) for owner, name in self._known[key].lifted]
        return self._known[key].call(list(state.values()), given, lifted)

    def _traced(
        self, state: dict[str, Any], leaves: list[Any], shape: Any, places: list[int], given: list[Any]
    ) -> _Traced:
        """Trace the region, outside the watch, and return it with its plans."""
        with _apart(self._mode), _refusing_checkpoints():
            with torch.no_grad():
                args, kwargs = pytree.tree_unflatten(leaves, shape)
                self._forward(*args, **kwargs)  # makes what a module keeps from its first call
            lifted = _kept_tensors(self._module, state, given)

            def function(parameters: list[Any], inputs: list[Any], attributes: list[Any]) -> Any:
                filled = list(leaves)
                for place, tensor in zip(places, inputs, strict=True):
                    filled[place] = tensor
                args, kwargs = pytree.tree_unflatten(filled, shape)
                named = dict(zip(state, parameters, strict=True))
                with _reparametrize_module(self._module, named), _set(lifted, attributes):
                    return self._forward(*args, **kwargs)

            traced = _Traced(function, lifted, self._watch, self._mode, self._plans)
            traced.prepare(list(state.values()), given, [getattr(owner, name) for owner, name in lifted])
        return traced


class _Traced:
    """A region as AOTAutograd traced it, whose two passes are plans."""

    def __init__(
        self,
        function: Callable[..., Any],
        lifted: Any,
        watch: StorageWatch,
        mode: FakeTensorMode,
        plans: dict[Any, CompiledPlan],
    ) -> None:
        self.lifted = lifted
        self._watch, self._mode, self._plans = watch, mode, plans
        self._context = TracingContext(mode)
        self._counts = False
        self.call: Callable[..., Any] = aot_function(
            function,
            fw_compiler=partial(self._compiled, is_backward=False),
            bw_compiler=partial(self._compiled, is_backward=True),
            partition_fn=partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    def prepare(self, *arguments: Any) -> None:
        """Trace the function and plan its forward pass; nothing counts."""
        with tracing(self._context), V.set_fake_mode(self._mode):
            self.call(*arguments)
        self._counts = True

    def _compiled(self, gm: Any, example_inputs: Sequence[Any], *, is_backward: bool) -> Any:
        with _apart(contextlib.nullcontext()):
            metadata = self._context.fw_metadata
            donated = tuple((metadata and metadata.bw_donated_idxs) or ())
            key = (is_backward, donated, gm.code, *map(_described, example_inputs))
            if key not in self._plans:
                self._plans[key] = plan_of(gm, example_inputs, self._mode, donated, is_backward=is_backward)
            plan = self._plans[key]

        def run(arguments: list[Any]) -> list[Any]:
            saved = self._watch.saved if is_backward and self._counts else None
            return _run(plan, arguments, self._watch if self._counts else None, saved)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  # AOTAutograd hands over a list
        return run


def _run(
    plan: CompiledPlan,
    arguments: list[Any],
    watch: StorageWatch | None,
    saved: Callable[[torch.Tensor], Any] | None,
) -> list[Any]:
    """Run a plan on its arguments, which it takes out of their list; return its results.

    Args:
        saved: makes an object during whose life an argument counts as saved; autograd has given all of them
            up when a compiled backward pass begins.
    """
    held: dict[str, Any] = dict(zip(plan.inputs, arguments, strict=True))
    arguments.clear()
    kept = {} if saved is None else {n: saved(t) for n, t in held.items() if isinstance(t, torch.Tensor)}
    for launch in plan.launches:
        if watch is not None:
            watch.kernel = launch.name
            if launch.is_product:
                watch.take_workspace()
        for name, made in launch.made.items():
            held[name] = _empty(made)
        for name, other in launch.aliases.items():
            held[name] = held.get(other)
        if watch is not None:
            watch.kernel = ""
        for name in launch.freed:
            held.pop(name, None)
            kept.pop(name, None)
    return [_result(output, held) for output in plan.outputs]


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype, value.requires_grad


def _empty(made: Allocation) -> torch.Tensor:
    return torch.empty_strided(made.size, made.stride, dtype=made.dtype)


def _result(output: Output, held: dict[str, Any]) -> Any:
    if output.view is None:
        return output.value
    buffer, view = held.get(output.name), output.view
    if buffer is None:  # a constant
        return _empty(view)
    if buffer.dtype != view.dtype:
        raise NotModelledError("a compiled part returns a view of another format")
    if tuple(buffer.shape) == view.size and buffer.stride() == view.stride:
        return buffer
    return buffer.as_strided(view.size, view.stride, output.offset)


def _kept_tensors(module: torch.nn.Module, state: dict[str, Any], given: list[Any]) -> list[tuple[Any, str]]:
    """Return owners and names of tensors that modules keep as plain attributes."""
    known = {id(tensor) for tensor in (*state.values(), *given)}
    return [
        (part, name)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and id(value) not in known and not is_wrapper(type(value))
    ]


@contextlib.contextmanager
def _set(owners: list[tuple[Any, str]], values: Sequence[Any]) -> Iterator[None]:
    """Give attributes other values in the block."""
    before = [getattr(owner, name) for owner, name in owners]
    for (owner, name), value in zip(owners, values, strict=True):
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in zip(owners, before, strict=True):
            setattr(owner, name, value)


def _refused(*_: Any, **__: Any) -> Any:
    raise NotModelledError("a compiled part has checkpoints inside")


@contextlib.contextmanager
def _refusing_checkpoints() -> Iterator[None]:
    """Refuse checkpoints in the block, which what is traced would forget."""
    checkpoint: Any = sys.modules.get("torch.utils.checkpoint")
    kinds = {
        "_checkpoint_without_reentrant_generator": _refused,
        "CheckpointFunction": SimpleNamespace(apply=_refused),
    }
    with mock.patch.multiple(checkpoint, **kinds):
        yield


@contextlib.contextmanager
def _apart(mode: Any) -> Iterator[None]:
    """Leave the watch and the hooks of saved tensors out of the block, in which fake tensors stay fake."""
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  its type does not know it
    popped: list[Any] = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        popped.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        with _disable_current_modes(), mode:
            yield
    finally:
        for pack, unpack in reversed(popped):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def reason_of(failed: BaseException) -> str:
    """Return in a few words why a step could not be run as Inductor compiles it."""
    while not isinstance(failed, NotModelledError) and failed.__cause__ is not None:
        failed = failed.__cause__
    words = str(failed).strip().partition("\n")[0]
    return words if isinstance(failed, NotModelledError) else f"{type(failed).__name__}: {words}"[:LONGEST]
