from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.checkpoint import Checkpoints, Found, _write, restore
from meshwright.checkpoint._restore import _empty
from meshwright.errors import InputError

LAYOUTS: list[dict[str, int]] = [
    {},
    {"fsdp": 8},
    {"tensor": 4},
    {"fsdp": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def saved(checkpoints: Checkpoints, state: Any) -> Found:
    checkpoints.save(1, state, {})
    found = checkpoints.newest()
    assert found is not None
    return found


@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_any_layout_is_restored_onto_any_other_bit_for_bit(
    checkpoints: Checkpoints,
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    same_bits: Callable[[Any, Any], bool],
    mesh: Callable[..., Mesh],
    before: dict[str, int],
):
    state = small_state(5, **before)
    found = saved(checkpoints, state)
    for after in LAYOUTS:
        wanted = abstract(state, mesh(**after))
        restored = checkpoints.restore(found, wanted)
        assert same_bits(restored, state)
        shardings = jax.tree.map(lambda x: x.sharding, (restored, wanted))
        assert shardings[0] == shardings[1]


def test_arrays_in_several_files_are_restored_too(
    checkpoints: Checkpoints,
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    same_bits: Callable[[Any, Any], bool],
    mesh: Callable[..., Mesh],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_write, "FILE_BYTES", 100)
    state = small_state(5, fsdp=2)
    found = saved(checkpoints, state)
    assert len(found.manifest.files) > 10
    assert same_bits(checkpoints.restore(found, abstract(state, mesh(fsdp=8))), state)


def test_a_device_is_given_its_shard_alone(
    checkpoints: Checkpoints, mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
):
    split = NamedSharding(mesh(fsdp=8), PartitionSpec("fsdp"))
    found = saved(checkpoints, {"x": jax.device_put(np.arange(64.0, dtype=np.float32), split)})
    put: list[tuple[int, int]] = []
    device_put = jax.device_put

    def noting(values: np.ndarray, place: Any) -> Any:
        (device,) = place.device_set
        put.append((device.id, values.nbytes))
        return device_put(values, place)

    monkeypatch.setattr(jax, "device_put", noting)
    restore(found, {"x": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=split)})
    assert sorted(put) == [(device, 32) for device in range(8)]


def test_what_is_restored_may_be_donated_in_place(checkpoints: Checkpoints):
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {"x": increment(jnp.zeros((256, 256)))}
    found = saved(checkpoints, state)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    restored = restore(found, wanted)["x"]
    address = restored.unsafe_buffer_pointer()
    assert increment(restored).unsafe_buffer_pointer() == address


def test_memory_for_a_shard_is_never_what_jax_would_take_over():
    for num in (1, 7, 4096):
        values = _empty((num, 3), np.dtype(np.float32))
        assert values.shape == (num, 3)
        assert values.ctypes.data % 64 == 32


def test_a_part_of_the_state_can_be_restored_alone(
    checkpoints: Checkpoints,
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    same_bits: Callable[[Any, Any], bool],
):
    state = small_state(2)
    found = saved(checkpoints, state)
    part = {"parameters": abstract(state)["parameters"]}
    restored = restore(found, part, only=["parameters"])
    assert same_bits(restored["parameters"], state["parameters"])


def test_an_array_that_only_one_side_has_is_named(
    checkpoints: Checkpoints, small_state: Callable[..., Any], abstract: Callable[..., Any], tmp_path: Path
):
    found = saved(checkpoints, small_state())
    less, more = abstract(small_state()), abstract(small_state())
    del less["key"]
    more["loss_scale"] = more["step"]
    with pytest.raises(
        InputError, match=r"step 1 in .*checkpoints has key, which this config's state has not"
    ):
        restore(found, less)
    with pytest.raises(InputError, match=r"has no loss_scale, which this config's state has\n.*config\.json"):
        restore(found, more)
    many = {**more, **{f"x{number}": more["step"] for number in range(4)}}
    with pytest.raises(InputError, match="has no loss_scale, x0, x1 and 2 more"):
        restore(found, many)


def test_another_shape_or_format_is_named_with_both(
    checkpoints: Checkpoints, small_state: Callable[..., Any], abstract: Callable[..., Any]
):
    found = saved(checkpoints, small_state())
    wanted = abstract(small_state())
    matrix = wanted["parameters"]["matrix"]
    wanted["parameters"]["matrix"] = jax.ShapeDtypeStruct((8, 17), jnp.float32, sharding=matrix.sharding)
    with pytest.raises(
        InputError, match=r"parameters/matrix as float32\[8,16\], and this config as float32\[8,17"
    ):
        restore(found, wanted)
    wanted["parameters"]["matrix"] = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=matrix.sharding)
    with pytest.raises(InputError, match=r"float32\[8,16\], and this config as bfloat16\[8,16\]"):
        restore(found, wanted)
