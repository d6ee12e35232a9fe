"""Price the operations of a PyTorch step and queue them on the streams of the target's device.

The host runs the step as PyTorch does: each operation that has a kernel is launched on the current stream,
and FSDP's own events order the streams. The prices are those of the compiled program's kernels: products by
their shapes, attention as PyTorch's own flash kernel, everything else by the bytes that it reads and writes.
Not modelled: kernels that read their operands several times, the host's work in hooks and in DTensor, and
kernels that slow down while messages are sent.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright import ledger
from meshwright.eager import RankMessage
from meshwright.errors import InputError
from meshwright.predict import Machine, Walked, attention_seconds

from ._aten_flops import ATTENTION_RULES, OWN_NAMESPACE, OperationCall, OperationFlops
from ._queue import MAIN, Mark, Queue, unaligned_share
from ._rank_traffic import KINDS

# Operations without a kernel, beside views.
SILENT = frozenset(
    """
alias as_strided detach empty empty_like empty_permuted empty_strided _fused_sdp_choice
_has_same_storage_numel is_same_size lift lift_fresh new_empty new_empty_strided _nnz record_stream resize
_resize_output set_ set sym_constrain_range sym_constrain_range_for_size _unsafe_view _indices _values
is_pinned _assert_tensor_metadata _is_all_true
""".split()  # noqa: SIM905  quotes less
)
SILENT_NAMESPACES = ("prim", "profiler", "_dtensor")
LOOKUPS = ("embedding", "gather", "index", "index_select")
READ_LITTLE = (*LOOKUPS, "nll_loss_forward", "nll_loss_backward")  # of their floating operands
OVERWRITES = ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")
# Their gradients of scale and shift are a kernel of its own, which reads both operands again (PyTorch,
# aten/src/ATen/native/cuda/layer_norm_kernel.cu).
TWICE = ("native_layer_norm_backward", "_fused_rms_norm_backward")
# The operands of products by operation: left [..., m, k] and right [..., k, n].
PRODUCTS = {
    "mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "_addmm_activation": ("mat1", "mat2"),
    "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2"), "addbmm": ("batch1", "batch2"),
    "_int_mm": ("self", "mat2"), "_scaled_mm": ("self", "mat2"), "_grouped_mm": ("self", "mat2"),
}  # fmt: skip
HALVES = ("bf16", "fp16")
ALIGNED = 8  # numbers of 16 bits, whose 16 bytes cuBLAS's fast kernels read at once
VECTORS = ("mv", "addmv", "dot", "vdot", "addr")  # whose bytes take longer than their FLOPs


class Launches:
    """The queue of one rank's step, filled by its operations in the order in which the host meets them.

    Messages of the functional form run beside the stream that sends them until somebody waits.
    """

    def __init__(self, machine: Machine, num_devices: int) -> None:
        self.machine = machine
        self._queue = Queue(machine, num_devices)
        self.why_not = ""  # why the step has no time
        self._streams: dict[Any, int] = {id(torch.cpu.current_stream()): MAIN}
        self._alive: list[Any] = []  # streams, so that no other gets the number of one that is gone
        self._sent: dict[int, Mark] = {}  # by the storage of a result that somebody will wait for

    def stream(self, stream: Any = None) -> int:
        """Return the number of one of PyTorch's streams; the current one without an argument."""
        stream = torch.cpu.current_stream() if stream is None else stream
        if id(stream) not in self._streams:
            self._alive.append(stream)
        return self._streams.setdefault(id(stream), len(self._streams))

    def operation(self, func: Any, call: OperationCall, counted: OperationFlops | None) -> None:
        """Launch an operation that is no message; `counted` are its FLOPs, if it has a rule."""
        bare = _bare(call.name)
        if func.is_view or bare in SILENT or call.name.startswith(SILENT_NAMESPACES):
            return
        self._queue.host(self.machine.shared.eager_launch_seconds)
        moved = moved_bytes(func, call, bare)
        if counted is None or bare in VECTORS or not counted.flops:
            machine = self.machine
            per_second = machine.memory_bytes_per_second * machine.memory_efficiency
            seconds = moved / (per_second * machine.shared.eager_memory_share)
            if call.name.startswith(OWN_NAMESPACE):
                self._queue.walked.unpriced[f"{bare}: no rate of it is known, it is priced by its bytes"] += 1
            self._queue.kernel(self.stream(), "memory-bound", seconds)
            return
        kind, format_name, seconds = self._priced(call, bare, counted, moved)
        self._queue.kernel(self.stream(), kind, seconds, {format_name: counted.flops} if seconds else None)

    def _priced(
        self, call: OperationCall, bare: str, counted: OperationFlops, moved: int
    ) -> tuple[str, str, float]:
        """Return the class of an operation with FLOPs, the format in which it runs, and its seconds."""
        unpriced = self._queue.walked.unpriced
        is_convolution = bare.startswith("convolution")
        format_name = self._running_format(counted.format, is_convolution=is_convolution)
        peak = self.machine.peak_flops_per_second.get(format_name)
        kind = "attention" if bare in ATTENTION_RULES else "convolution" if is_convolution else "matmul"
        if peak is None:
            unpriced[f"{kind} in {format_name}: {self.machine.name} has no known peak for it"] += 1
            return kind, format_name, 0.0
        if kind == "attention":
            if "flash" not in bare:
                unpriced[f"{bare}: no rate of it is known, it is priced as flash attention"] += 1
            return kind, format_name, self._attention(call, bare, counted, format_name, peak)
        sizes = _convolution_sizes(call, counted) if is_convolution else _product_sizes(call, bare)
        if sizes is None:
            unpriced[f"{bare}: no rate of it is known"] += 1
            return kind, format_name, 0.0
        batch, m, n, k = sizes
        times = counted.flops / (2 * batch * m * n * k)  # a convolution's backward pass is two
        once = self.machine.product_seconds(format_name, m=m, n=n, k=k, batch=batch, num_bytes=moved / times)
        seconds = times * float(once)
        if bare in PRODUCTS and format_name in HALVES:
            share = unaligned_share(self.machine.name, _alignment(call, bare))
            seconds = max(seconds, counted.flops / (peak * share)) if share else seconds
        return kind, format_name, seconds

    def _attention(
        self, call: OperationCall, bare: str, counted: OperationFlops, format_name: str, peak: float
    ) -> float:
        key = call.shape("key")
        length = key[-2] if bare.startswith(("_scaled", "flex")) else key[-3]
        rate = self.machine.attention_rate(key[-1], length, format_name, "backward" in bare)
        return float(attention_seconds(rate, flops=counted.flops, length=length, flops_per_second=peak))

    def _running_format(self, format_name: str, *, is_convolution: bool) -> str:
        """Return the format in which a product runs: PyTorch's switches say when fp32 becomes tf32."""
        if format_name != "fp32" or "tf32" not in self.machine.peak_flops_per_second:
            return format_name
        backends: Any = torch.backends  # its older switches raise where a script has used the newer ones
        switch = backends.cudnn.conv if is_convolution else backends.cuda.matmul
        return "tf32" if switch.fp32_precision == "tf32" else "fp32"

    def message(self, call: OperationCall, message: RankMessage, ranks: tuple[int, ...]) -> None:
        """Send a message on the current stream, or on its own stream if something waits for it later."""
        try:
            self._send(call, message, ranks)
        except InputError as unknown:  # the catalog has no figure for a link
            self.why_not = self.why_not or unknown.message

    def _send(self, call: OperationCall, message: RankMessage, ranks: tuple[int, ...]) -> None:
        self._queue.host(self.machine.shared.eager_launch_seconds)
        if message.kind not in KINDS.values():
            return  # listed as unpriced with the traffic
        sent = ledger.Message(
            kind=message.kind,
            axes=message.axes or None,
            group_size=message.group_size,
            payload_bytes=message.payload_bytes,
            wire_bytes=message.wire_bytes,
            groups="{{" + ",".join(map(str, ranks)) + "}}",
        )
        current = self.stream()
        functional = not call.name.startswith("c10d.")
        if not functional and not call.arguments.get("async_op"):
            self._queue.message(current, sent)
            return
        beside = self._streams.setdefault(ranks, len(self._streams))
        self._queue.wait(beside, self._queue.mark(current))
        self._queue.message(beside, sent)
        if functional:
            for tensor in pytree.tree_leaves(call.result):
                self._sent[tensor.untyped_storage()._cdata] = self._queue.mark(beside)

    def wait_for(self, tensor: torch.Tensor) -> None:
        """Let the current stream wait for the message whose result a tensor is."""
        mark = self._sent.pop(tensor.untyped_storage()._cdata, None)
        if mark is not None:
            self._queue.wait(self.stream(), mark)

    def record(self, stream: Any = None) -> Mark:
        """Return the end of a stream so far."""
        return self._queue.mark(self.stream(stream))

    def wait(self, stream: Any, mark: Mark) -> None:
        """Let a stream wait for a mark."""
        self._queue.wait(self.stream(stream), mark)

    def join(self) -> None:
        """Let the main stream wait for all others, as the optimizer does for the gradients."""
        self._queue.join()

    def finish(self) -> Walked:
        """Return the times of the step."""
        return self._queue.finish()


def _bare(name: str) -> str:
    """Return an operation's name without its namespace and the underscore of an in-place form."""
    bare = name.partition(".")[2]
    return bare[:-1] if bare.endswith("_") and bare != "set_" else bare


def _product_sizes(call: OperationCall, bare: str) -> tuple[float, float, float, float] | None:
    """Return batch, m, n and k of a product; None if it is none of `PRODUCTS`."""
    if bare not in PRODUCTS:
        return None
    left, right = (call.shape(name) for name in PRODUCTS[bare])
    if bare == "_grouped_mm":
        if len(left) == 2 and len(right) == 3:  # rows of all groups, which are taken to be as large
            return right[0], max(left[0] / right[0], 1), right[2], left[1]
        if len(left) == 2:  # the groups divide the contracted dimension
            groups = int(call.result.shape[0])
            return groups, left[0], right[1], max(left[1] / groups, 1)
    return math.prod(left[:-2]), left[-2], right[-1], left[-1]


def _alignment(call: OperationCall, bare: str) -> int:
    """Return the largest power of 2, up to 8, that divides where rows begin in operands and result."""
    common = ALIGNED
    matrices = (*(call[name] for name in PRODUCTS[bare]), call.result)
    for matrix in (each for each in matrices if each.layout == torch.strided):
        # Of a matrix whose columns lie in one piece each, these are the rows.
        apart = sorted(stride for stride, size in zip(matrix.stride(), matrix.shape, strict=True) if size > 1)
        common = math.gcd(common, matrix.storage_offset(), *(int(stride) for stride in apart[1:]))
    return common


def _convolution_sizes(call: OperationCall, counted: OperationFlops) -> tuple[float, float, float, float]:
    """Return the sizes of the product that a convolution's implicit-GEMM kernel computes."""
    kernel = call.shape("weight")
    result = call.shape("grad_output") if "grad_output" in call.arguments else call.result.shape
    rows = math.prod(result) / kernel[0]
    return 1, rows, kernel[0], math.prod(kernel[1:])


def moved_bytes(func: Any, call: OperationCall, bare: str) -> int:
    """Return the bytes that a kernel reads and writes: each operand once, each result once.

    An operand that is broadcast counts what it holds. Lookups read what they return. What an operation
    overwrites is not read.
    """
    total, held = 0, set[int]()
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = writes and (bare in OVERWRITES or argument.name.startswith("out"))
        for tensor in _tensors(call.arguments[argument.name]):
            held.add(tensor.untyped_storage()._cdata)
            size = held_bytes(tensor)
            reads = 0 if overwritten or (bare in READ_LITTLE and tensor.is_floating_point()) else size
            total += reads * (1 + (bare in TWICE)) + size * writes
    for tensor in _tensors(call.result):
        if tensor.untyped_storage()._cdata not in held:
            total += held_bytes(tensor) * (1 + (bare in LOOKUPS))
    return total


def held_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the different elements of a tensor.

    >>> held_bytes(torch.zeros(4, 1).expand(4, 8))
    16
    """
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(int(size) for size, stride in sizes if stride)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)


@contextlib.contextmanager
def watching_streams(launches: Launches | None) -> Iterator[None]:
    """Let the CPU's streams and events, which do nothing, order the queue in the block."""
    if launches is None:
        yield
        return
    stream, event = torch.cpu.Stream, torch.cpu.Event
    names = {stream: ("wait_stream", "record_event", "wait_event"), event: ("record", "wait", "synchronize")}
    originals = {(kind, name): getattr(kind, name) for kind, methods in names.items() for name in methods}

    def record(self: Any, on: Any = None) -> None:
        self.mark = launches.record(on)

    def record_event(self: Any, into: Any = None) -> Any:
        into = event() if into is None else into
        into.mark = launches.record(self)
        return into

    def wait_event(self: Any, awaited: Any) -> None:
        if hasattr(awaited, "mark"):
            launches.wait(self, awaited.mark)

    replaced = {
        (stream, "wait_stream"): lambda self, other: launches.wait(self, launches.record(other)),
        (stream, "record_event"): record_event,
        (stream, "wait_event"): wait_event,
        (event, "record"): record,
        (event, "wait"): lambda self, on=None: wait_event(on or torch.cpu.current_stream(), self),
        (event, "synchronize"): lambda self: None,
    }
    for (kind, name), function in replaced.items():
        setattr(kind, name, function)
    try:
        yield
    finally:
        for (kind, name), function in originals.items():
            setattr(kind, name, function)
