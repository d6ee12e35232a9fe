"""Ask Inductor, without a card, which buffers a compiled graph allocates, reuses and frees, and when.

Inductor's own passes, decompositions, partitioner, lowering and scheduler run here, on fake tensors of a card
that is described by hand; no kernel is generated. What a fused kernel makes for itself takes no memory.
Not modelled: what a kernel takes by itself, tuning by trial (`max-autotune`), CUDA graphs, and padding of
products, which is chosen by timing them.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import compile_fx, ir, scheduler
from torch._inductor.codegen.common import Kernel
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

CARD = torch.device("cuda", 0)
# An H100: what Inductor asks of a card decides how it splits sums, not what it keeps.
CAPABILITY = (9, 0)
PROPERTIES = {
    "multi_processor_count": 132,
    "major": 9,
    "regs_per_multiprocessor": 65_536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


class NotModelledError(Exception):
    """Says why a region is not weighed as Inductor compiles it."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A buffer of a compiled graph as the allocator gives it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Launch:
    """Describe what one kernel of a compiled graph does to the buffers.

    `aliases`: new names of buffers that exist: views, buffers that are written in place, or that take over
    the memory of an operand that is no longer needed. `freed`: after the kernel.
    """

    name: str
    made: dict[str, Allocation] = field(default_factory=dict[str, Allocation])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    freed: tuple[str, ...] = ()
    is_product: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A result of a compiled graph: a number or None, or a view of a buffer."""

    value: Any = None
    name: str = ""
    view: Allocation | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """The buffers of a compiled graph, kernel by kernel."""

    inputs: tuple[str, ...]
    launches: tuple[Launch, ...]
    outputs: tuple[Output, ...]


def partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
    """Divide a joint graph into forward and backward pass as Inductor does, after its passes."""
    return compile_fx.partition_fn(joint, inputs, **how)


@contextlib.contextmanager
def described_card() -> Iterator[None]:
    """Answer what Inductor asks of a card in the block, without one."""
    properties = SimpleNamespace(
        **PROPERTIES, minor=0, total_memory=80 * 2**30, name="", gcnArchName="", L2_cache_size=50 * 2**20,
        shared_memory_per_block_optin=232_448,
    )  # fmt: skip
    described = DeviceProperties(type="cuda", index=0, cc=90, **PROPERTIES)
    cuda: Any = torch.cuda
    with (
        mock.patch.object(DeviceProperties, "create", return_value=described),
        mock.patch.object(scheduler, "has_triton", return_value=True),
        mock.patch.multiple(
            cuda,
            get_device_properties=lambda *_, **__: properties,
            get_device_capability=lambda *_: CAPABILITY,
            current_device=lambda: 0,
        ),
    ):
        yield


def plan_of(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    donated: Sequence[int] = (),
    *,
    is_backward: bool,
) -> CompiledPlan:
    """Return what the kernels of a graph do to its buffers.

    Args:
        graph: the forward or the backward pass, with decomposed operations.
        mode: of its fake tensors.
        donated: places among the inputs of those that nobody needs after the graph.
    """
    with described_card(), torch.no_grad():
        changed = copy.deepcopy(graph)
        view_to_reshape(changed)
        with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            FakeTensorProp(changed, mode).propagate_dont_convert_inputs(*inputs)
            compile_fx._recursive_post_grad_passes(changed, is_inference=False)
            FakeTensorProp(changed, mode).propagate_dont_convert_inputs(*inputs)
            moved, there = _on_card(changed, inputs, mode)
            lowered = GraphLowering(moved, example_inputs=there, is_backward=is_backward, is_inference=False)
            lowered.bw_donated_idxs = list(donated) if is_backward else None
            with V.set_graph_handler(lowered):
                lowered.run(*there)
                lowered.init_wrapper_code()
                lowered._update_scheduler()
                return _walked(lowered, moved)


def _on_card(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return the graph with its tensors on the card, and its inputs there.

    Operations are not run again: some ask for a driver when their operands are on a card.
    """

    def there(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CARD)

    def moved(tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, there, tree)

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CARD}
        if node.op == "call_function":
            node.args = pytree.tree_map_only(torch.device, lambda _: CARD, node.args)
        if "val" in node.meta:
            node.meta["val"] = moved(node.meta["val"])
    for name, held in list(graph.named_buffers()):
        owner, _, last = name.rpartition(".")
        setattr(graph.get_submodule(owner), last, there(held))
    return graph, [moved(each) for each in inputs]


def _walked(lowered: GraphLowering, graph: torch.fx.GraphModule) -> CompiledPlan:
    """Return the plan of a graph that is lowered and scheduled, while it is the current one."""
    order: Any = lowered.scheduler
    made: set[str] = set()
    launches = [_launch(order, node, made) for node in order.nodes]
    (result,) = (node for node in graph.graph.nodes if node.op == "output")
    values = result.args[0]
    outputs = tuple(_output(found, value) for found, value in zip(lowered.graph_outputs, values, strict=True))
    return CompiledPlan(tuple(lowered.graph_input_names), tuple(launches), outputs)


def _launch(order: Any, node: Any, made: set[str]) -> Launch:
    """Return what one scheduled node does; `made` are the names of all buffers so far."""
    inner, names = node.get_nodes(), {each.get_name() for each in node.get_nodes()}
    kernel = Kernel(increase_kernel_count=False)
    with V.set_kernel_handler(kernel):
        for each in inner:
            each.decide_inplace_update()
    launch = Launch(_name_of(node), freed=tuple(node.last_usage))
    for buffer in node.get_outputs():
        name = buffer.get_name()
        if order.can_buffer_be_removed_through_fusion(name, names):
            V.graph.removed_buffers.add(name)  # it lives in registers
        elif name in kernel.inplace_update_buffers:
            launch.aliases[name] = kernel.inplace_update_buffers[name]
            made.add(name)
        else:
            _allocate(launch, buffer.node, made)
            for user in buffer.users:  # results of an operation that returns several
                held = getattr(user.node, "node", None)
                if isinstance(buffer.node.get_output_spec(), ir.MultiOutputLayout) and isinstance(
                    held, ir.MultiOutput
                ):
                    _allocate(launch, held, made)
    order.completed_operations.update(names)
    launch.is_product = any(
        str(getattr(each.node, "op_overload", "")).startswith(tuple(f"aten.{name}." for name in PRODUCTS))
        for each in inner
    )
    return launch


def _allocate(launch: Launch, buffer: Any, made: set[str]) -> None:
    """Let a launch make a buffer, or another name of one."""
    name = buffer.get_name()
    if name in made:
        return
    made.add(name)
    layout = buffer.get_output_spec()
    aliased = [*buffer.get_inputs_that_alias_output(), *buffer.get_mutation_names()]
    if isinstance(layout, ir.NonOwningLayout):
        base: Any = layout.view.data
        while not hasattr(base, "get_output_spec") or isinstance(base, ir.MutableBox):
            base = base.data
        if isinstance(base, ir.Buffer) and base.get_name() not in V.graph.graph_inputs:
            _allocate(launch, base, made)
        launch.aliases[name] = base.get_name()
    elif isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
        launch.aliases[name] = layout.target.get_name()
    elif aliased and isinstance(layout, ir.Layout):
        launch.aliases[name] = aliased[0]
    elif isinstance(layout, ir.Layout) and not isinstance(layout, ir.NoneLayout | ir.MultiOutputLayout):
        launch.made[name] = _allocation(layout)


def _allocation(layout: Any) -> Allocation:
    return Allocation(tuple(map(int, layout.size)), tuple(map(int, layout.stride)), layout.dtype)


def _output(found: Any, value: Any) -> Output:
    if not isinstance(value, torch.fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return Output(value=None if isinstance(value, torch.fx.Node) else value)
    layout = found.get_layout()
    return Output(name=found.get_name(), view=_allocation(layout), offset=int(layout.offset))


def _name_of(node: Any) -> str:
    """Return the operation of a library's kernel, or what a fused kernel computes in short."""
    held = getattr(node, "node", None)
    operation = getattr(held, "op_overload", None)
    if operation is not None:
        return str(operation).rpartition(".")[0]
    origins = {
        str(origin.target).split(".")[1]
        for each in node.get_nodes()
        for origin in (each.node.get_origins() if each.node is not None else ())
        if str(origin.target).count(".") >= 1
    }
    shown = sorted(origins)[:4]
    return "fused " + "_".join(shown) if shown else node.get_name()
