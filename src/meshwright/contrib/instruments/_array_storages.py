"""Find the memory behind an array of jax, numpy or torch, and reject values that JAX is tracing.

A storage is a block of memory with an address, a size and a device; several views may share one. Two
libraries may share one too (`torch.from_numpy`, `np.asarray` of a jax array on a CPU); their addresses reveal
it. `footprint`, `live`, `memory` and `clock` use this module.
"""

from __future__ import annotations

import dataclasses
import mmap
import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from meshwright.contrib.jax_steps import refuse_traced
from meshwright.errors import InputError
from meshwright.formats import format_of_dtype

_DENSE = {"quantized": "tensor.dequantize()", "nested": "torch.nested.to_padded_tensor(tensor, 0.0)"}
HOST = "cpu"  # numpy's device and torch's CPU; jax names its first CPU device "cpu:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory on one device; `address` is None for an abstract array, which has no allocation."""

    device: str
    address: int | None
    num_bytes: int
    host: bool  # true if the address is in this process's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFootprint:
    """One array of a tree; the defaults are those of a jax array.

    `num_bytes`: elements x bytes per element, for the global shape. `storages`: the memory that the array
    keeps alive, on all devices that this process sees. `strides` and `offset_elements` count elements; None
    if the library does not expose them (jax). `shares_storage_with`: the path of the first array in the tree
    that uses the same memory.
    """

    path: str
    library: str  # jax | numpy | torch
    shape: tuple[int, ...]
    format: str
    num_bytes: int
    storages: tuple[Storage, ...]
    strides: tuple[int, ...] | None = None
    offset_elements: int | None = None
    contiguous: bool = True
    is_view: bool = False
    shares_storage_with: str | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each storage."""
        return tuple(storage.device for storage in self.storages)

    @property
    def storage_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.num_bytes for storage in self.storages)


def array_footprint(array: Any, path: str) -> ArrayFootprint:
    """Return the footprint of the array at `path`, as if it were alone.

    Raises:
        InputError: the value is traced, a deleted jax array, an array of Python objects or with a mask, a
            torch tensor of a layout without a single storage, or no array.
    """
    import jax

    refuse_traced(array, path, "bytes")
    if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        return _jax(array, path)
    if isinstance(array, np.ndarray | np.generic):
        return _numpy(array, path)
    if _is_torch(array):
        return _torch(array, path)
    kind, hint = type(array), "convert it with numpy.asarray, or leave it out of the tree"
    if dataclasses.is_dataclass(array):
        hint = f"make its class a pytree: jax.tree_util.register_dataclass({kind.__qualname__})"
    elif hasattr(array, "state_dict"):
        hint = "give its state_dict()"
    raise InputError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, not an array of jax, numpy or torch", hint=hint
    )


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")  # no tensor exists before torch is imported
    return torch is not None and isinstance(array, torch.Tensor)


def _jax(array: Any, path: str) -> ArrayFootprint:
    import jax
    import jax.numpy as jnp

    if isinstance(array, jax.ShapeDtypeStruct):
        return _abstract(array, path)
    if array.is_deleted():
        raise InputError(
            f"{path} is a jax array that was deleted or donated: its memory is freed",
            hint="measure it before the call that donates it, or measure the result of that call",
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    kind = array.sharding.memory_kind
    storages = tuple(
        Storage(device=_jax_device(d, kind), address=address, num_bytes=size, host=d.platform == "cpu")
        for d, address, size in buffers_of(array)
    )
    return ArrayFootprint(
        path=path,
        library="jax",
        shape=array.shape,
        format=format_name(array.dtype),
        num_bytes=_stored_bytes(array.shape, array.dtype),
        storages=storages,
    )


def buffers_of(array: Any) -> list[tuple[Any, int, int]]:
    """Return device, address and bytes of each shard in this process; none if another thread deleted it."""
    try:
        shards = [(shard.device, shard.data) for shard in array.addressable_shards]
        return [(d, data.unsafe_buffer_pointer(), _bytes_on(d, data)) for d, data in shards]
    except RuntimeError:
        if array.is_deleted():
            return []
        raise


def _bytes_on(device: Any, data: Any) -> int:
    """Return the bytes of one shard by the runtime, corrected for numbers of 2 or 4 bits.

    jaxlib 0.10's runtime counts a whole byte for a number of 4 bits. On CPUs and GPUs, compiled programs and
    transfers pack two into a byte.
    """
    if device.platform in ("cpu", "gpu") and _bits(data.dtype) < 8:
        return _stored_bytes(data.shape, data.dtype)
    return data.on_device_size_in_bytes()


def _bits(dtype: Any) -> int:
    """Return the bits of a number as XLA stores it; numbers of 2 or 4 bits share bytes."""
    import jax

    extended = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    bits = 0 if extended else jax.dtypes.itemsize_bits(dtype)
    return bits if bits in (2, 4) else 8 * dtype.itemsize


def _stored_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return -(-prod(shape) * _bits(dtype) // 8)


def _abstract(array: Any, path: str) -> ArrayFootprint:
    """Describe an abstract array: on each device of its sharding, or else on an unnamed one."""
    import jax
    import jax.numpy as jnp

    shape, dtype, sharding = array.shape, array.dtype, array.sharding
    devices, shard = ["abstract"], shape
    if sharding is not None:
        devices = sorted({_jax_device(d, sharding.memory_kind) for d in sharding.device_set})
        shard = sharding.shard_shape(shape)
    shard_bytes, num_bytes = _stored_bytes(shard, dtype), _stored_bytes(shape, dtype)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    return ArrayFootprint(
        path=path,
        library="jax",
        shape=shape,
        format=format_name(dtype),
        num_bytes=num_bytes,
        storages=tuple(Storage(device=d, address=None, num_bytes=shard_bytes, host=False) for d in devices),
    )


def _jax_device(device: Any, memory_kind: str | None) -> str:
    """Return "gpu:0", or "gpu:0 pinned_host" for memory that is not the device's default."""
    name = f"{device.platform}:{device.id}"
    return name if memory_kind in (None, device.default_memory().kind) else f"{name} {memory_kind}"


def _numpy(array: Any, path: str) -> ArrayFootprint:
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            f"{path} is a masked array of numpy, which holds two arrays", hint="give its .data and its .mask"
        )
    if array.dtype.hasobject:
        raise InputError(
            f"{path} is an array of numpy of dtype {array.dtype}: it holds addresses of Python's objects, "
            "whose bytes are elsewhere",
            hint="give it a dtype of numbers with .astype, or leave it out of the tree",
        )
    array = np.asarray(array)
    owner = _numpys_owner(array)
    start, end = np.lib.array_utils.byte_bounds(owner)
    itemsize = max(array.itemsize, 1)
    offset = array.__array_interface__["data"][0] - start
    # The strides of a field in a structured array need not be a whole number of elements.
    whole = not any(step % itemsize for step in (*array.strides, offset))
    return ArrayFootprint(
        path=path,
        library="numpy",
        shape=array.shape,
        format=format_name(array.dtype),
        num_bytes=array.nbytes,
        storages=(Storage(device=HOST, address=start, num_bytes=end - start, host=True),),
        strides=tuple(stride // itemsize for stride in array.strides) if whole else None,
        offset_elements=offset // itemsize if whole else None,
        contiguous=bool(array.flags.c_contiguous),
        is_view=owner is not array or not array.flags.owndata,
    )


def _numpys_owner(array: np.ndarray) -> np.ndarray:
    """Return an array over the whole block that `array` keeps alive."""
    owner = array
    while True:
        # `as_strided` inserts an object between an array and its base.
        below = owner.base if isinstance(owner.base, np.ndarray) else getattr(owner.base, "base", None)
        if not isinstance(below, np.ndarray):
            break
        owner = below
    base: Any = owner.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, bytes | bytearray | mmap.mmap):
        return np.frombuffer(base, np.uint8)
    if _is_torch(base):
        torch = sys.modules["torch"]
        return torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage()).numpy()
    return owner


def _torch(tensor: Any, path: str) -> ArrayFootprint:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = str(tensor.layout).removeprefix("torch.")
        if tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else "nested"
        raise InputError(
            f"{path} is a torch tensor that is {kind}: it has no single strided storage",
            hint=f"give its parts, or {_DENSE.get(kind, 'tensor.to_dense()')}",
        )
    real = tensor.device.type != "meta" and not is_fake(tensor)
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr() if real else storage._cdata
    except (RuntimeError, ValueError) as error:
        # A value inside torch.func's transforms, a lazy parameter, or a subclass that wraps other tensors.
        raise InputError(
            f"{path} is a torch {type(tensor).__name__} without a storage of its own: "
            f"{str(error).partition('. ')[0]}",
            hint="measure it outside torch.func's transforms, after the first call of a lazy module, or by "
            "the tensors that it is made of",
        ) from error
    on_host = real and tensor.device.type == "cpu"
    device = HOST if on_host else str(tensor.device) if real else "meta"
    return ArrayFootprint(
        path=path,
        library="torch",
        shape=tuple(tensor.shape),
        format=format_name(tensor.dtype),
        num_bytes=tensor.numel() * tensor.element_size(),
        storages=(Storage(device=device, address=address, num_bytes=storage.nbytes(), host=on_host),),
        strides=tuple(tensor.stride()),
        offset_elements=tensor.storage_offset(),
        contiguous=tensor.is_contiguous(),
        is_view=tensor._is_view() or storage.nbytes() != tensor.numel() * tensor.element_size(),
    )


def is_fake(tensor: Any) -> bool:
    """Return True if a torch tensor has a shape and a device, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def format_name(dtype: Any) -> str:
    """Return our name for a dtype of any library ("fp32", "bf16", "int32"), or its own name if we have none.

    Numpy's dtypes with named fields are all "structured".
    """
    if getattr(dtype, "names", None):
        return "structured"
    name = str(dtype).removeprefix("torch.")
    try:
        return format_of_dtype(name).name
    except InputError:
        return name
