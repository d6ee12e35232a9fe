"""Where an array's bytes lie, by library: jax, numpy, torch.

A storage is a block of memory with an address, a size and a device; arrays that are views share one. Two
libraries may share one too (`torch.from_numpy`, `np.asarray` of a jax array on a CPU): addresses tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..errors import InputError
from ..formats import format_of_dtype
from ._traced import refuse_traced

HOST = "cpu"  # where numpy's arrays lie; jax and torch call their first CPU device differently


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory on one device. `address` is None where nothing is allocated: an abstract array."""

    device: str
    address: int | None
    num_bytes: int
    host: bool  # whether the address is one of this process's own memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one array."""

    library: str
    shape: tuple[int, ...]
    format: str
    num_bytes: int  # elements x bytes each
    storages: tuple[Storage, ...]
    strides: tuple[int, ...] | None
    offset_elements: int | None
    contiguous: bool
    is_view: bool


def facts_of(array: Any, path: str) -> Facts:
    """The facts of one array.

    Raises:
        InputError: a traced value, a deleted jax array, a torch layout without one storage, or no array.
    """
    refuse_traced(array, path, "bytes")
    module = type(array).__module__.partition(".")[0]
    if _is_jax(array):
        return _jax(array, path)
    if isinstance(array, np.ndarray | np.generic):
        return _numpy(np.asarray(array))
    if module == "torch" or _is_torch(array):
        return _torch(array, path)
    raise InputError(
        f"{path} is a {type(array).__module__}.{type(array).__qualname__}: no array of jax, numpy or torch",
        hint="convert it with numpy.asarray, or leave it out of the tree",
    )


def _is_jax(array: Any) -> bool:
    import jax

    return isinstance(array, jax.Array | jax.ShapeDtypeStruct)


def _is_torch(array: Any) -> bool:
    import sys

    torch = sys.modules.get("torch")  # a tensor cannot be there without it
    return torch is not None and isinstance(array, torch.Tensor)


def _jax(array: Any, path: str) -> Facts:
    import jax
    import jax.numpy as jnp

    if isinstance(array, jax.ShapeDtypeStruct):
        return _abstract(array)
    if array.is_deleted():
        raise InputError(
            f"{path} is a jax array that was deleted or donated: its memory is given up",
            hint="measure it before the call that donates it, or measure what that call returned",
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    storages = tuple(
        Storage(
            device=_jax_device(shard.device),
            address=shard.data.unsafe_buffer_pointer(),
            num_bytes=shard.data.on_device_size_in_bytes(),
            host=shard.device.platform == "cpu",
        )
        for shard in array.addressable_shards
    )
    return Facts(
        library="jax",
        shape=array.shape,
        format=format_name(array.dtype),
        num_bytes=array.nbytes,
        storages=storages,
        strides=None,
        offset_elements=None,
        contiguous=True,
        is_view=False,
    )


def _abstract(array: Any) -> Facts:
    """What the array would take: on each device of its sharding, else on one that is not named."""
    itemsize = array.dtype.itemsize
    devices = ["abstract"] if array.sharding is None else [_jax_device(d) for d in array.sharding.device_set]
    shard = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    each = prod(shard) * itemsize
    return Facts(
        library="jax",
        shape=array.shape,
        format=format_name(array.dtype),
        num_bytes=prod(array.shape) * itemsize,
        storages=tuple(Storage(device=d, address=None, num_bytes=each, host=False) for d in devices),
        strides=None,
        offset_elements=None,
        contiguous=True,
        is_view=False,
    )


def _jax_device(device: Any) -> str:
    return f"{device.platform}:{device.id}"


def _numpy(array: np.ndarray) -> Facts:
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start, end = np.lib.array_utils.byte_bounds(owner)
    itemsize = max(array.itemsize, 1)
    return Facts(
        library="numpy",
        shape=array.shape,
        format=format_name(array.dtype),
        num_bytes=array.nbytes,
        storages=(Storage(device=HOST, address=start, num_bytes=end - start, host=True),),
        strides=tuple(stride // itemsize for stride in array.strides),
        offset_elements=(array.__array_interface__["data"][0] - start) // itemsize,
        contiguous=bool(array.flags.c_contiguous),
        is_view=owner is not array or not array.flags.owndata,
    )


def _torch(tensor: Any, path: str) -> Facts:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InputError(
            f"{path} is a torch tensor of layout {tensor.layout}, which is no one storage with strides",
            hint="give its parts, as tensor.indices() and tensor.values(), or tensor.to_dense()",
        )
    storage = tensor.untyped_storage()
    real = tensor.device.type != "meta" and not _is_fake(tensor)
    device = HOST if tensor.device.type == "cpu" else str(tensor.device)
    return Facts(
        library="torch",
        shape=tuple(tensor.shape),
        format=format_name(tensor.dtype),
        num_bytes=tensor.numel() * tensor.element_size(),
        storages=(
            Storage(
                device=device if real else "meta",
                address=storage.data_ptr() if real else storage._cdata,
                num_bytes=storage.nbytes(),
                host=real and tensor.device.type == "cpu",
            ),
        ),
        strides=tuple(tensor.stride()),
        offset_elements=tensor.storage_offset(),
        contiguous=tensor.is_contiguous(),
        is_view=tensor._is_view() or storage.nbytes() != tensor.numel() * tensor.element_size(),
    )


def _is_fake(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def format_name(dtype: Any) -> str:
    """Our name of a dtype of any library ("fp32", "bf16"); one that is no floating format keeps its own."""
    name = str(dtype).removeprefix("torch.")
    try:
        return format_of_dtype(name).name
    except InputError:
        return name
