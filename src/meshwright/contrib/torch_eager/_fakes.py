"""Replace the tensors of a user's module with fake ones, and explain failures that happen on them.

Fake tensors have real shapes but no bytes. This module imports torch, so it is imported only while
accounting.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.contrib.jax_steps import USERS_FAILURES
from meshwright.errors import InputError

from ._aten_flops import operation_name, tensor_text
from ._hooks import hooks_of

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def check_parts(module: Any, inputs: Any, optimizer: Any, loss: Any, autocast: Any) -> None:
    """Reject wrong parts of a step.

    Raises:
        InputError: an argument is not a module, tensor, optimizer class, function or format; the message says
            what it should be.
    """
    _check_module(module)
    for path, leaf in pytree.tree_leaves_with_path(inputs):
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not isinstance(leaf, torch.Tensor):
            kind = f"{type(leaf).__module__.partition('.')[0]}'s {type(leaf).__name__}"
            raise InputError(
                f"an input is {kind}, not a tensor ({pytree.keystr(path)})",
                hint="torch.from_numpy(numpy.asarray(...)) makes one",
            )
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise InputError(
            f"the optimizer is a {kind} that already holds real parameters; the account runs a copy",
            hint=f"give the class, torch.optim.{kind}, or functools.partial(torch.optim.{kind}, lr=...)",
        )
    for name, part in (("optimizer", optimizer), ("loss", loss)):
        if part is not None and not callable(part):
            raise InputError(
                f"the {name} is a {type(part).__name__}, not callable",
                hint=f"give a class or function as {name}",
            )
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise InputError(
            f"autocast={autocast!r} is not a floating-point format",
            hint="use torch.bfloat16 or torch.float16",
        )


def _check_module(module: Any) -> None:
    if inspect.isclass(module):
        raise InputError(
            f"{module.__name__} is a class, not a module", hint=f"make one: {module.__name__}(...)"
        )
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"a {type(module).__name__} is not a torch.nn.Module", hint="give a module, then its inputs"
        )
    kind = type(module).__name__
    if kind in WRAPPERS:
        raise InputError(
            f"the module is wrapped in {kind} already",
            hint="give its .module; on a mesh, wrap it in the function that is given as parallelize",
        )
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        raise InputError(
            f"the parameters of {kind} are spread over a mesh already",
            hint="give the module as it is before, and the function that spreads it as parallelize",
        )
    homes: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        homes.setdefault(parameter.device, name)
    if len({device.type == "meta" for device in homes}) > 1:
        found = " and ".join(f"{name} on {device}" for device, name in homes.items())
        raise InputError(
            f"the parameters of {kind} are on different devices, {found}: PyTorch refuses an operation on "
            "two devices",
            hint="account it whole on one: module.to('meta'), or make every part with the same device=",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{kind} is compiled by TorchScript, which does not accept fake tensors",
            hint="give the module from which it was made",
        )


def as_given(module: Any) -> Any:
    """Return a module that `torch.compile` wraps as it was before; any other value as it is."""
    return getattr(module, "_orig_mod", module)


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Silence PyTorch's log of a failed fake operation; the error that is raised says the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


MIXED = "mixed torch.Tensor and DTensor"
UPDATED_TOGETHER = "it updates DTensors and plain tensors together, which fails on real ranks too"
SPARSE = "a gradient is sparse, and it is not known how ranks reduce one; FSDP2 does not"
DENSE = "give the embedding sparse=False, or weigh the step on one device"
# Words of PyTorch's failures, what they mean here, and what to do.
KNOWN = (
    (
        MIXED,
        UPDATED_TOGETHER,
        "let parallelize spread every parameter (SequenceParallel for norms, fully_shard for the rest), or "
        "give an optimizer that updates them one by one: functools.partial(torch.optim.AdamW, "
        "foreach=False). bitsandbytes takes no DTensor; the optimizers of torchao do",
    ),
    (
        MIXED,
        "it runs while its parameters are sharded, as it would on real ranks",
        "FSDP2 gathers parameters when the module that it was called on runs: give parallelize=f "
        "and call fully_shard on this part too, or leave the part around it to the root. What a plan of "
        "DTensor's splits stays split: make the plain tensor that meets it a DTensor too",
    ),
    (
        "in-place operations that require placement changes",
        "DTensor has no rule for one of its operations, which fails on real ranks too",
        "give an optimizer that takes sharded parameters, such as torch.optim.AdamW",
    ),
    ("Cannot access storage of SparseTensorImpl", SPARSE, DENSE),
    (
        "Expected all tensors to be on the same device",
        "two tensors of one operation are on different devices",
        "copy one to where the other is: y.to(x.device); of a module, all parameters: module.to(device)",
    ),
    (
        "FlexAttention does not support backward on CPU",
        "flex attention has no gradients on a CPU",
        "name GPUs: on='1xH100'",
    ),
    (
        "its data is not allocated yet",
        "code outside of PyTorch's operations reads the values of a tensor, and fake tensors have none",
        "make it an operation: torch.library.custom_op with register_fake; in place of the older `replicate` "
        "call DistributedDataParallel, or replicate of torch.distributed._composable.replicate_with_fsdp",
    ),
    (
        "FSDP needs a non-CPU accelerator",
        "FSDP1 (FullyShardedDataParallel) needs a real GPU",
        "call torch.distributed.fsdp.fully_shard, FSDP2, on each block and on the module",
    ),
    (
        "Torch not compiled with CUDA enabled",
        "it asks for a CUDA device, and there is none here",
        "spread the module over the mesh that parallelize is given, and leave devices out",
    ),
)


def explain_failure(failed: BaseException, what: str, paths: dict[int, str], hint: str) -> InputError:
    """Convert the failure of `what` ("the forward pass") to an error that names module and line.

    The error's hint is `hint`, but an operation without a fake form, with a result that depends on data, or
    on parameters that are not gathered, has its own.
    """
    place = f"{what} failed{_module_place(failed, paths)} {failed_place(failed)}"
    if isinstance(failed, DynamicOutputShapeException | DataDependentOutputException):
        name = operation_name(failed.func)
        result = "shape" if isinstance(failed, DynamicOutputShapeException) else "number"
        return InputError(
            f"{place}: the {result} that {name} returns depends on the data, and fake tensors have none",
            hint="account the module with that part replaced: no shape and no branch may depend on values",
        )
    if isinstance(failed, UnsupportedOperatorException):
        name = operation_name(failed.func)
        if name == "c10d.allreduce_":  # of any other gradient it has one
            return InputError(f"{place}: {SPARSE}", hint=DENSE)
        return InputError(
            f"{place}: {name} has no fake form, which computes the shape of its result",
            hint=f"register it: @torch.library.register_fake({name.replace('.', '::', 1)!r})",
        )
    for words, said, do in KNOWN:
        if words in str(failed) and (said != UPDATED_TOGETHER or what == "the optimizer"):
            devices = re.search(r"at least two devices, (.+)!", str(failed))
            return InputError(f"{place}: {said}{f', {devices[1]}' if devices else ''}", hint=do)
    return InputError(f"{place}: {type(failed).__name__}: {failed}", hint=hint)


def failed_place(failed: BaseException) -> str:
    """Return the innermost line that is neither PyTorch's nor ours."""
    frames = traceback.extract_tb(failed.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return f"at {outside[-1].filename}:{outside[-1].lineno}" if outside else "inside PyTorch"


def _module_place(failed: BaseException, paths: dict[int, str]) -> str:
    """Return the innermost module whose method was running."""
    place = ""
    for frame, _ in traceback.walk_tb(failed.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in paths:
            place = f" in {paths[id(owner)] or 'the module itself'} ({type(owner).__name__})"
    return place


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def mode_of(*trees: Any) -> FakeTensorMode:
    """Return the mode of the first fake tensor in `trees`, or else a new mode."""
    for tree in trees:
        tensors = (
            [*tree.parameters(), *tree.buffers()]
            if isinstance(tree, torch.nn.Module)
            else pytree.tree_leaves(tree)
        )
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    # Real tensors in closures are converted when an operation uses them; `StorageWatch` rejects those that
    # require a gradient.
    return FakeTensorMode(allow_non_fake_inputs=True)


class Fakes:
    """A maker of fake tensors: originals that share a storage get fakes that share one; meta becomes CPU."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, torch.Tensor] = {}  # by the original's id: a tensor given twice gets one fake
        self._bases: dict[int, torch.Tensor] = {}  # by the original's storage
        self._originals: list[Any] = []  # kept alive, so that no other object takes one of their ids

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a deep copy with fake tensors; the original does not change.

        Raises:
            InputError: a tensor is of an unusual kind, or the module cannot be copied.
        """
        memo: dict[int, Any] = {}
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            memo[id(tensor)] = self.tensor(tensor, path)
        try:
            with _Copying(self):
                return copy.deepcopy(module, memo)
        except InputError:
            raise
        except USERS_FAILURES as failed:
            raise InputError(
                f"{type(module).__name__} cannot be copied: {type(failed).__name__}: {failed}",
                hint="the account runs a copy: keep locks, files and processes out of the module",
            ) from failed

    def tree(self, tree: Any) -> Any:
        """Return nested lists, tuples and dicts with each tensor replaced by a fake one."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self.tensor(tensor, "an input"), tree)

    def tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a fake leaf with the same shape, strides, storage size and `requires_grad`.

        Raises:
            InputError: the tensor is not a plain strided tensor, or has no shape yet.
        """
        if is_lazy(tensor):
            raise InputError(
                f"{name} has no shape yet: the module is lazy",
                hint="call the module once on a small input first",
            )
        plain = type(tensor) in PLAIN or isinstance(tensor, torch.nn.Parameter)
        if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = type(tensor).__name__ if not plain else str(tensor.layout).removeprefix("torch.")
            raise InputError(
                f"{name} is a tensor of an unusual kind ({kind}), whose memory cannot be read",
                hint="account the module with plain strided tensors",
            )
        if id(tensor) not in self._made:
            self._originals.append(tensor)
            self._made[id(tensor)] = self._make(tensor)
        return self._made[id(tensor)]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode, torch.no_grad():
            base = self._base(tensor)
            typed = base[: base.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
            fake = typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()
        if not isinstance(tensor, torch.nn.Parameter):
            return fake.requires_grad_(tensor.requires_grad)
        made = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():  # set by the user, perhaps for the optimizer
            vars(made).setdefault(name, value)
        for hook in hooks_of(tensor):
            made.register_post_accumulate_grad_hook(hook)
        return made

    def _base(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake of the tensor's storage, as bytes."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bases:
            self._originals.append(storage)
            device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
            self._bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        return self._bases[storage._cdata]


class _Copying(TorchFunctionMode):
    """A mode around `copy.deepcopy` that also fakes tensors outside parameters and buffers."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fakes.tensor(tensor, f"an attribute, {tensor_text(tensor)},")
            return memo[id(tensor)]
        if func is torch._C.TensorBase.clone:  # a parameter of no module, copied through its `.data`
            return self._fakes.tensor(args[0], f"an attribute, {tensor_text(args[0])},")
        return func(*args, **(kwargs or {}))
