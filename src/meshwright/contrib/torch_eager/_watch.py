"""Watch each ATen operation of a step: its FLOPs, phase and module, and the storages that it creates.

A storage counts once, with its exact bytes, from the operation that creates it until it is freed.
Not counted: memory that a kernel allocates and frees within one operation; the rounding of CUDA's allocator,
which rounds each storage up to 512 bytes.

In the forward pass an operation belongs to the innermost module whose `forward` runs. In the backward pass it
belongs to the module in whose forward the autograd node was created, found by the node's sequence number.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from meshwright.eager import RankMessage
from meshwright.errors import InputError
from meshwright.hlo import Axes

from ._aten_flops import (
    OWN_NAMESPACE,
    RULES,
    OperationCall,
    OperationFlops,
    call_of,
    flops_of,
    format_name,
    is_silent,
    operation_name,
    tensor_text,
)
from ._attention_kernels import counted_bins, grouped_product
from ._fakes import Fakes
from ._launches import PRODUCTS, VECTORS, Launches
from ._rank_traffic import NAMESPACES, message_kind, message_of
from ._source_lines import line_at_work

TEMPORARY = "temporaries"
SAVED = "saved activations"
INPUTS = "inputs"
STAGING = "communication buffers"
OFFLOADED = "offloaded activations"
WORKSPACES = "workspaces"


@dataclass(frozen=True, slots=True)
class Birth:
    """The operation that made a storage, with its phase, module and line; empty for what was there before."""

    phase: str = ""
    module: str | None = None
    operation: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class StorageChange:
    """One change of a storage: bytes that it gains or loses, and how often more it is saved for later."""

    instant: int  # operations that had ended
    phase: str
    storage: WatchedStorage
    num_bytes: int = 0
    saved: int = 0
    stream: int = 0  # on which the bytes are allocated


@dataclass(slots=True)
class WatchedStorage:
    """One storage from its creation to its end: its bytes now, and what made it."""

    reference: Any  # weak
    number: int  # in the order of creation
    format: str
    shape: tuple[int, ...]
    num_bytes: int = 0
    category: str = TEMPORARY
    saved_times: int = 0
    born: Birth = Birth()
    on_host: bool = False  # in the host's memory, not the device's

    @property
    def counts_as(self) -> str:
        return SAVED if self.category == TEMPORARY and self.saved_times else self.category


class Storages:
    """All storages seen; `live` holds bytes by category now, and `at_peak` holds them at the peak.

    `changes`: the history of all storages, from which `_timeline` makes the memory through a step.
    `on_host`: as `live`, of storages in the host's memory, which are in no other figure.
    `host_peak_bytes`: the most that these were at one instant, without temporaries.
    """

    def __init__(self) -> None:
        self.changes: list[StorageChange] = []
        self.instant = 0
        self.phase = ""
        self.birth = Birth()  # of the storages that the operation at hand makes
        self.live: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}
        self.peak_phase = ""
        self.on_host: Counter[str] = Counter()
        self.host_peak_bytes = 0
        self.makes_on_host = False  # where the storages of the operation at hand are
        self._storages: dict[int, WatchedStorage] = {}
        self._created = 0
        # FSDP's streams are objects also on a CPU, where they run nothing. The first is everybody's.
        self._streams: dict[int, int] = {id(torch.cpu.current_stream()): 0}

    def see(self, tensor: torch.Tensor) -> WatchedStorage:
        """Record a tensor's storage and return it; if its size has changed, correct the count."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, lambda _: self._freed(key))
            self._created += 1
            known = self._storages[key] = WatchedStorage(
                reference,
                self._created,
                format_name(tensor.dtype),
                tuple(tensor.shape),
                born=self.birth,
                on_host=self.makes_on_host,
            )
        self._resize(known, num_bytes)
        return known

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Correct the count of a storage whose size was changed without an operation, as FSDP does."""
        known = self._storages.get(storage._cdata)
        if known is not None:
            self._resize(known, storage.nbytes())

    def _resize(self, known: WatchedStorage, num_bytes: int) -> None:
        if more := num_bytes - known.num_bytes:
            self._add(known, more)
            known.num_bytes = num_bytes
            if known.on_host:
                return
            stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
            self.changes.append(StorageChange(self.instant, self.phase, known, num_bytes=more, stream=stream))

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """Record parameters that are in the host's memory before the step."""
        self.makes_on_host = True
        self.put(tensor, "parameters")
        self.makes_on_host = False

    def move_to_host(self, tensor: torch.Tensor) -> None:
        """Count a tensor in the host's memory that was taken to be on the device."""
        known = self.see(tensor)
        if not known.on_host:
            self._add(known, -known.num_bytes)
            self.changes.append(StorageChange(self.instant, self.phase, known, num_bytes=-known.num_bytes))
            known.on_host = True
            self._add(known, known.num_bytes)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is known to be in the host's memory."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.on_host

    def held_bytes(self, category: str) -> int:
        """Return the bytes of a category now, on the device and on the host."""
        return self.live[category] + self.on_host[category]

    def put(self, tensor: torch.Tensor, category: str) -> None:
        """Set the category of a tensor's storage, unless it already has one; a buffer may become another."""
        known = self.see(tensor)
        if known.category in (TEMPORARY, STAGING):
            self._change(known, category=category)
            known.format = format_name(tensor.dtype)

    def put_from_outside(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was there before the step, and is met only now, among the inputs."""
        now, self.phase, self.birth = self.phase, "", Birth()
        self.put(tensor, INPUTS)
        self.phase = now

    def stage(self, tensor: torch.Tensor) -> None:
        """Mark a tensor as a communication buffer, unless it has another category already."""
        known = self.see(tensor)
        if known.category in (TEMPORARY, INPUTS):
            self._change(known, category=STAGING)

    def save(self, tensor: torch.Tensor) -> int:
        """Record that the forward pass keeps a tensor for the backward pass; return the key for `release`."""
        self._change(self.see(tensor), saved=1)
        return tensor.untyped_storage()._cdata

    def release(self, key: int) -> None:
        """Undo one `save`."""
        if key in self._storages:
            self._change(self._storages[key], saved=-1)

    def hold_workspace(self, num_bytes: int) -> None:
        """Record memory that a library takes through the allocator, and keeps until the process ends."""
        self._created += 1
        born, format = Birth(operation="cuBLAS"), format_name(torch.uint8)
        held = WatchedStorage(None, self._created, format, (num_bytes,), num_bytes, WORKSPACES, born=born)
        self.changes.append(StorageChange(self.instant, self.phase, held, num_bytes=num_bytes))

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's storage is not known yet."""
        return tensor.untyped_storage()._cdata not in self._storages

    def note_peak(self, phase: str) -> None:
        """Compare the live bytes with the peak so far."""
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak, self.peak_phase = self.live_bytes, dict(self.live), phase

    def add_to_peak(self, category: str) -> None:
        """Change the peak so far as if all current bytes of `category` had been alive then."""
        more = self.live[category] - self.at_peak.get(category, 0)
        self.peak_bytes += more
        self.at_peak[category] = self.live[category]

    def by_format(self) -> dict[str, dict[str, int]]:
        """Return the live bytes of each category by number format, without temporaries."""
        sums: dict[str, dict[str, int]] = {}
        for storage in self._storages.values():
            if storage.counts_as != TEMPORARY and storage.num_bytes and not storage.on_host:
                formats = sums.setdefault(storage.counts_as, {})
                formats[storage.format] = formats.get(storage.format, 0) + storage.num_bytes
        return sums

    def _add(self, known: WatchedStorage, num_bytes: int) -> None:
        if known.on_host:
            self.on_host[known.counts_as] += num_bytes
            lasting = self.on_host.total() - self.on_host[TEMPORARY]
            self.host_peak_bytes = max(self.host_peak_bytes, lasting)
            return
        self.live[known.counts_as] += num_bytes
        self.live_bytes += num_bytes

    def _change(self, known: WatchedStorage, *, category: str | None = None, saved: int = 0) -> None:
        self._add(known, -known.num_bytes)
        known.category = category or known.category
        known.saved_times += saved
        self._add(known, known.num_bytes)
        if saved and not known.on_host:
            self.changes.append(StorageChange(self.instant, self.phase, known, saved=saved))

    def _freed(self, key: int) -> None:
        known = self._storages.pop(key)
        self._add(known, -known.num_bytes)
        if known.num_bytes and not known.on_host:
            self.changes.append(StorageChange(self.instant, self.phase, known, num_bytes=-known.num_bytes))
        known.num_bytes = 0


@contextlib.contextmanager
def watching_sizes(storages: Storages) -> Iterator[None]:
    """Record the sizes that storages are given without an operation: FSDP frees what it gathers that way."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        storages.resized(storage)
        return result

    setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010  a method of C's, says its type
    try:
        yield
    finally:
        setattr(torch.UntypedStorage, "resize_", original)  # noqa: B010


class ModuleStack:
    """A context that follows which module runs, among one module and its children."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.paths: dict[int, str] = {id(child): path for path, child in root.named_modules()}
        self._root = root
        self._stack: list[str | None] = []
        # At each change of the innermost module: the next autograd node's number, and the module's path.
        self._numbers: list[int] = [0]
        self._innermost: list[str | None] = [None]
        self._hooks: list[Any] = []

    def __enter__(self) -> ModuleStack:
        self._hooks = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def inside(self) -> bool:
        """True while some module's forward runs."""
        return bool(self._stack)

    def path(self) -> str | None:
        """Return the innermost module's path ("" is the root), or None outside all modules."""
        found = self.place()
        recomputes = not self._stack and torch._C._current_autograd_node() is not None
        if recomputes and torch.is_grad_enabled() and found != self._innermost[-1]:
            # A function without a module is recomputed: the node just created for it belongs to `found` too.
            self._numbers.append(_next_number() - 1)
            self._innermost.append(found)
        return found

    def place(self) -> str | None:
        """Return the same as `path` for an operation that makes no autograd node."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        return self._innermost[max(bisect.bisect_right(self._numbers, node._sequence_nr()) - 1, 0)]

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        # A module that is no child (a loss, or one created in the step) counts for the module that calls it.
        outer = self._stack[-1] if self._stack else None
        self._stack.append(self.paths.get(id(module), outer))
        self._changed()

    def _left(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        self._stack.pop()
        self._changed()

    def _changed(self) -> None:
        # Node numbers rise, also in recomputation: nodes created from now on belong to this module.
        self._numbers.append(_next_number())
        self._innermost.append(self._stack[-1] if self._stack else None)


def _next_number() -> int:
    """Return the sequence number of the next autograd node of this thread."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER = "forward", "backward", "recomputed", "optimizer"
SILENT_TAGS = ("Tag.pointwise", "Tag.reduction", "Tag.view_copy", "Tag.inplace_view")
SILENT_NAMESPACES = ("prim", "profiler", "fsdp", "_dtensor")  # they copy, and multiply nothing
# Kernels of bitsandbytes without products: those of its optimizers and of its formats.
BITSANDBYTES = ("optimizer_update", "quantize", "dequantize")
# Operations that take a handle of cuBLAS. Grouped products are CUTLASS's, outer ones elementwise.
OF_CUBLAS = {f"aten.{name}" for name in (*PRODUCTS, *VECTORS)} - {"aten._grouped_mm", "aten.addr"}
# Shapes of results that PyTorch's own rules do not know.
FAKE_FORMS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: grouped_product,
    torch.ops.aten.bincount.default: counted_bins,
}
CONTAINERS = (list, tuple, dict)  # and classes that extend them, such as torch.Size
LIFTED = ("aten.lift_fresh", "aten.lift", "aten.lift_fresh_copy")  # they bring a new constant into a step


class StorageWatch(TorchDispatchMode):
    """A dispatch mode above the fake one; `phase` is the part of the step, "" while nothing counts.

    `mesh_axes`: names and sizes of the mesh's axes, for the collectives; empty on one device.
    """

    def __init__(self, stack: ModuleStack, storages: Storages, fakes: Fakes, mesh_axes: Axes = ()) -> None:
        super().__init__()
        self.messages: list[tuple[RankMessage, tuple[int, ...], str]] = []  # with their ranks and lines
        self.flops: Counter[tuple[str, str | None]] = Counter()  # by phase and module path
        self.by_operation: Counter[str] = Counter()
        self.by_format: Counter[str] = Counter()
        self.by_line: Counter[tuple[str, str]] = Counter()
        self.unknown: Counter[str] = Counter()
        self.numbers_are_one = False  # `.item()` may return 1 while nothing that is counted depends on it
        self.numbers_read = 0
        self.looks_away = False  # while operations only ask for shapes
        self.own_mistake: Exception | None = None
        self.launches: Launches | None = None  # where the step's time is wanted
        self.workspace_bytes = 0  # that cuBLAS takes for each thread with products
        self.kernel = ""  # that Inductor made, while its buffers are made
        self._have_workspace: set[bool] = set()  # the threads, by whether they run the backward pass
        self._to_host: bool | None = None  # where the copy at hand goes; None where its operands are
        self._stack = stack
        self._storages = storages
        self._fakes = fakes
        self._mesh_axes = mesh_axes

    @property
    def phase(self) -> str:
        """The part of the step: forward | backward | optimizer, or "" while nothing counts."""
        return self._storages.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._storages.phase = phase
        if phase == OPTIMIZER and self.launches is not None:
            self.launches.join()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):  # a DTensor: it calls the operation again on its local tensors
            return NotImplemented
        kwargs = kwargs or {}
        if self.looks_away or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self.numbers_are_one:
            return self._number(func, args)
        if func is torch.ops.aten.clone.default and args[0].layout == torch.sparse_coo:
            return _sparse_clone(args[0])
        kind = kind_of(func)
        if kind == "unknown":  # it may decompose into known operations, as `linear` does in inference mode
            with self:
                made_of = func.decompose(*args, **kwargs)
            if made_of is not NotImplemented:
                return made_of
        if operation_name(func) not in LIFTED:
            args, kwargs = self._all_met(args), self._all_met(kwargs)
        if self._storages.on_host or self._to_host:
            self._storages.makes_on_host = self._goes_to_host((args, kwargs))
        result = (FAKE_FORMS.get(func) or func)(*args, **kwargs)
        try:
            self._note(func, args, kwargs, result, kind)
        except Exception as mistake:
            self.own_mistake = mistake
            raise
        finally:
            self._storages.makes_on_host = False
        return result

    def _goes_to_host(self, operands: Any) -> bool:
        """Return True if the results of an operation are in the host's memory, as one of its operands is."""
        if self._to_host is not None:
            return self._to_host
        tensors = (leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, torch.Tensor))
        return any(self._storages.is_on_host(tensor) for tensor in tensors if has_storage(tensor))

    def copied(self, tensor: torch.Tensor, *, to_host: bool, category: str = TEMPORARY) -> torch.Tensor:
        """Return a copy of a tensor in the host's memory, or in the device's."""
        self._to_host, before = to_host, self._to_host
        try:
            with torch.no_grad():
                copy = torch.clone(tensor, memory_format=torch.contiguous_format)
        finally:
            self._to_host = before
        if category != TEMPORARY:
            for inner in inner_tensors(copy):
                self._storages.put(inner, category)
        return copy

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in the host's memory."""
        return self._storages.is_on_host(tensor)

    def saved(self, tensor: torch.Tensor) -> SavedTensor:
        """Return an object during whose life a tensor counts as saved for the backward pass."""
        return SavedTensor(tensor, self._storages)

    def _number(self, func: Any, args: Any) -> Any:
        """Return the number in a tensor, or 1 where only a real run would compute it."""
        try:
            return func(*args)
        except DataDependentOutputException:
            self.numbers_read += 1
            return 1.0

    def outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a real tensor that a closure or a global holds; it counts among the inputs."""
        if tensor.requires_grad:
            raise InputError(
                f"the module or the loss uses a tensor from outside the module that requires a gradient, "
                f"{tensor_text(tensor)}",
                hint="make it a parameter of the module, and let no closure hold the module",
            )
        fake = self._fakes.tensor(tensor, "a tensor from outside the module")
        self._storages.put_from_outside(fake)
        return fake

    def _all_met(self, given: Any) -> Any:
        """Return arguments of an operation with each tensor met. PyTorch's own maps of trees take longer."""
        if isinstance(given, torch.Tensor):
            return self._met(given)
        if type(given) in (list, tuple):
            return type(given)(map(self._all_met, given))
        if type(given) is dict:
            return {name: self._all_met(each) for name, each in given.items()}
        return (
            pytree.tree_map_only(torch.Tensor, self._met, given) if isinstance(given, CONTAINERS) else given
        )

    def _met(self, tensor: torch.Tensor) -> torch.Tensor:
        if not has_storage(tensor):
            return tensor
        if not isinstance(tensor, FakeTensor):
            return self.outside(tensor)
        if self._storages.is_new(tensor):  # a fake tensor from outside the module
            self._storages.put_from_outside(tensor)
        return tensor

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, kind: str) -> None:
        operation = self.kernel or operation_name(func)
        line = self._line_now()
        self._storages.birth = Birth(self._phase_now(), self._stack.place(), operation, line)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and has_storage(tensor):
                self._storages.see(tensor)
        if not self.phase:
            return
        if self.workspace_bytes and operation_name(func).rstrip("_") in OF_CUBLAS:
            self.take_workspace()
        self._storages.note_peak(self.phase)
        self._storages.instant += 1
        if kind == "silent" and self.launches is None:
            return
        call = call_of(func, args, kwargs, result)
        if kind == "message":
            self._note_message(call)
            return
        counted = None if kind == "silent" else self._count(call, kind)
        if self.launches is not None:
            self.launches.operation(func, call, counted)

    def take_workspace(self) -> None:
        """Record the workspace of the thread at hand, once: the backward pass runs in one of its own."""
        is_backward = self.phase == BACKWARD
        if self.workspace_bytes and is_backward not in self._have_workspace:
            self._have_workspace.add(is_backward)
            self._storages.hold_workspace(self.workspace_bytes)

    def _count(self, call: OperationCall, kind: str) -> OperationFlops | None:
        counted = flops_of(call) if kind == "rule" else None
        if counted is None:
            self.unknown[str(call)] += 1
            return None
        path, phase = self._stack.path(), self._phase_now()
        self.flops[phase, path] += counted.flops - counted.recomputed_flops
        self.flops[RECOMPUTED, path] += counted.recomputed_flops
        self.by_operation[call.name] += counted.flops
        self.by_format[counted.format] += counted.flops
        self.by_line[self._line_now(), counted.format] += counted.flops
        return counted

    def _note_message(self, call: OperationCall) -> None:
        kind = message_kind(call.name)
        if kind is None:
            if self.launches is not None and call.name.endswith(".wait_tensor"):
                self.launches.wait_for(call["tensor"])
            return
        message, ranks = message_of(call, kind, self._phase_now(), self._mesh_axes)
        if message is not None:
            self.messages.append((message, ranks, self._line_now()))
            if self.launches is not None:
                self.launches.message(call, message, ranks)
        # What a caller hands over to be written or sent whole is a buffer, not a result.
        staged = {"all-gather": "output_tensor", "reduce-scatter": "input_tensor"}
        if self.phase == BACKWARD:
            staged["all-reduce"] = "tensors"  # of DDP, or a gradient, which is then put among those
        if call.name.startswith("c10d.") and kind in staged:
            for tensor in pytree.tree_leaves(call.arguments.get(staged[kind])):
                if isinstance(tensor, torch.Tensor):  # lists of results have other names
                    self._storages.stage(tensor)

    def _line_now(self) -> str:
        """Return the user's line at work; "" outside of the passes, where the step itself is at work."""
        return line_at_work() if self.phase in (FORWARD, BACKWARD) else ""

    def _phase_now(self) -> str:
        """Return the phase, with recomputation recognised.

        In the backward pass, work with gradients enabled or inside a module is recomputation.
        """
        if self.phase == BACKWARD and (torch.is_grad_enabled() or self._stack.inside):
            return RECOMPUTED
        return self.phase


@functools.cache
def kind_of(func: Any) -> str:
    """Return the kind of an operation: rule | message | silent | unknown."""
    namespace, _, name = operation_name(func).partition(".")
    if namespace in NAMESPACES:
        return "message"
    if f"{namespace}." == OWN_NAMESPACE:
        return "rule" if name in RULES else "silent"
    if namespace == "bitsandbytes" and name.startswith(BITSANDBYTES):
        return "silent"
    if namespace != "aten":
        return "silent" if namespace in SILENT_NAMESPACES else "unknown"
    if name in RULES:
        return "rule"
    silent = is_silent(name) or func.is_view or any(str(tag) in SILENT_TAGS for tag in _tags(func))
    return "silent" if silent else "unknown"


def _tags(func: Any) -> list[Any]:
    """Return the tags of all overloads and of the out-of-place form, since not every overload has them."""
    packets = (func._overloadpacket, getattr(torch.ops.aten, func._overloadpacket.__name__.rstrip("_"), None))
    overloads = [getattr(packet, name) for packet in packets if packet for name in packet.overloads()]
    return [tag for overload in overloads for tag in overload.tags]


def _sparse_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a fake sparse tensor, since PyTorch 2.13 loses the number of its elements."""
    indices, values = tensor._indices(), tensor._values()
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)


@functools.cache
def is_wrapper(kind: type) -> bool:
    """Return True for a class of tensors that hold other tensors, as a DTensor holds its shard."""
    return issubclass(kind, torch.Tensor) and is_traceable_wrapper_subclass_type(kind)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a wrapper holds on this rank, or the tensor itself."""
    if not is_wrapper(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    held = (getattr(tensor, name) for name in names)  # a DTensor holds its mesh too
    return [inner for each in held if isinstance(each, torch.Tensor) for inner in inner_tensors(each)]


def has_storage(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's bytes are in one storage; a sparse tensor's are in several."""
    return tensor.layout == torch.strided


class SavedTensor:
    """A tensor that autograd keeps for the backward pass; it counts as saved while this object exists."""

    __slots__ = ("_keys", "_storages", "tensor")

    def __init__(self, tensor: torch.Tensor, storages: Storages) -> None:
        self.tensor = tensor
        self._storages = storages
        inner = inner_tensors(tensor)
        # A real tensor is an input.
        self._keys = [storages.save(t) for t in inner if has_storage(t) and isinstance(t, FakeTensor)]

    def __del__(self) -> None:
        for key in self._keys:
            self._storages.release(key)


@contextlib.contextmanager
def keeping_selected(keep: Callable[[torch.Tensor], SavedTensor]) -> Iterator[None]:
    """Count what selective checkpointing keeps by its policy, which autograd does not see, by `keep`."""
    checkpoint: Any = sys.modules["torch.utils.checkpoint"]
    original = checkpoint._VersionWrapper  # around each result that it keeps

    class Kept(original):
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            self.saved = keep(value) if isinstance(value, torch.Tensor) else None

    checkpoint._VersionWrapper = Kept
    try:
        yield
    finally:
        checkpoint._VersionWrapper = original
