from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.errors import InputError, MeshwrightError
from meshwright.trainer.checkpoint import (
    MANIFEST,
    MANIFEST_HASH,
    Checkpoints,
    Found,
    hash_line,
    newest_checkpoint,
    restore,
)
from meshwright.trainer.checkpoint import _stored_arrays as _arrays
from meshwright.trainer.checkpoint._checkpoints import take_part, write_part
from meshwright.trainer.checkpoint._stored_arrays import (
    HostArray,
    box_of,
    chunk_shape_of,
    copy_off,
    empty_unaligned,
    leaves_by_path,
)
from meshwright.trainer.launch import SingleProcess

# By hand: 8 x 16 x 4 + 3 x 8 x 2 + 16 x 1 + 8 x 8 x 5 x 4 + 4 + 2 x 4 + 4
STATE_BYTES = 512 + 48 + 16 + 1280 + 4 + 8 + 4
OLD = Path(__file__).with_name("format1")  # written by Meshwright 0.1.0 as of ADR 0006

LAYOUTS: list[dict[str, int]] = [
    {},
    {"fsdp": 8},
    {"tensor": 4},
    {"fsdp": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def test_leaves_have_the_names_of_their_paths(small_state: Callable[..., Any]):
    assert list(leaves_by_path(small_state())) == [
        "key",
        "optimizer/0/mean",
        "optimizer/1/count",
        "parameters/low",
        "parameters/matrix",
        "parameters/tiny",
        "step",
    ]


def test_a_box_is_where_a_shard_begins_and_its_shape():
    assert box_of((slice(4, 8), slice(None)), (8, 16)) == ((4, 0), (4, 16))
    assert box_of((), ()) == ((), ())


@pytest.mark.parametrize(
    ("shape", "shard", "chunk"),
    [
        ((), (), ()),
        ((0, 3), (0, 3), (1, 3)),
        ((100, 8), (100, 8), (7, 8)),  # whole: may be cut unevenly
        ((64, 8), (32, 8), (8, 8)),
        ((202, 1), (101, 1), (101, 1)),  # half of it is in another process, and 101 is prime
        ((101, 2, 9), (101, 1, 9), (7, 1, 9)),
    ],
)
def test_chunks_are_of_the_size_wanted_and_divide_the_shards(
    shape: tuple[int, ...], shard: tuple[int, ...], chunk: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_arrays, "CHUNK_BYTES", 256)
    assert chunk_shape_of(shape, shard, 4) == chunk


@pytest.mark.parametrize("axes", [{}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_every_element_is_copied_once_however_many_devices_hold_it(
    small_state: Callable[..., Any], axes: dict[str, int]
):
    state = small_state(**axes)
    copied = copy_off(state)
    assert sum(piece.nbytes for array in copied for piece in array.pieces) == STATE_BYTES
    assert [array.path for array in copied] == list(leaves_by_path(state))


def test_what_was_copied_may_be_donated_in_place():
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = increment(jax.numpy.zeros((512, 512)))
    address = state.unsafe_buffer_pointer()
    (copied,) = copy_off({"x": state})
    after = increment(state)
    assert state.is_deleted()
    assert after.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(copied.pieces[0], np.ones((512, 512), np.float32))


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
        restored = restore(found, wanted)
        assert same_bits(restored, state)
        shardings = jax.tree.map(lambda x: x.sharding, (restored, wanted))
        assert shardings[0] == shardings[1]


def test_arrays_in_several_chunks_are_restored_too(
    checkpoints: Checkpoints,
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    same_bits: Callable[[Any, Any], bool],
    mesh: Callable[..., Mesh],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_arrays, "CHUNK_BYTES", 100)
    state = small_state(5, fsdp=2)
    found = saved(checkpoints, state)
    assert same_bits(restore(found, abstract(state, mesh(fsdp=8))), state)


def part_of(values: np.ndarray, *, start: int, size: int) -> HostArray:
    """Rows of an array that another process holds the rest of; two rows are a chunk."""
    return HostArray(
        keys=("x",),
        shape=values.shape,
        dtype=values.dtype.name,
        chunk_shape=(2, *values.shape[1:]),
        starts=((start, 0),) if size else (),
        pieces=(values[start : start + size],) if size else (),
    )


@pytest.mark.parametrize("rows", [(4, 4), (8, 0), (0, 8)])
def test_the_parts_of_several_processes_make_one_checkpoint(
    tmp_path: Path, rows: tuple[int, int], checkpoints: Checkpoints
):
    values = np.arange(24, dtype=np.float32).reshape(8, 3)
    folder = checkpoints._owned[0].begin(3)
    for process, start in ((1, rows[0]), (0, 0)):  # the first process may be the last one
        write_part(folder, [part_of(values, start=start, size=rows[process])], process)
    checkpoints._peers = Two()
    checkpoints._commit(3, [part_of(values, start=0, size=0)], {"lr": 0.1})
    found = newest_checkpoint(tmp_path / "checkpoints")  # which refuses a file that is not in the manifest
    assert found is not None
    assert found.about == {"lr": 0.1}
    np.testing.assert_array_equal(_arrays.whole_array(found, found.manifest.arrays[0]), values)


class Two(SingleProcess):
    count = 2


def test_rows_that_no_process_wrote_are_missed(checkpoints: Checkpoints):
    values = np.arange(24, dtype=np.float32).reshape(8, 3)
    folder = checkpoints._owned[0].begin(3)
    for process in (0, 1):
        write_part(folder, [part_of(values, start=0, size=4)], process)
    checkpoints._peers = Two()
    with pytest.raises(OSError, match="holds 3 of 5 entries: the processes do not see the same folder"):
        checkpoints._commit(3, [part_of(values, start=0, size=0)], {})


def test_a_part_that_is_not_there_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        take_part(tmp_path, 1)


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
        values = empty_unaligned((num, 3), np.dtype(np.float32))
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
        InputError, match=r"step 1 in .*checkpoints has key, which this config's state does not have"
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


def test_a_checkpoint_of_the_old_format_is_restored_onto_any_layout(
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    same_bits: Callable[[Any, Any], bool],
    mesh: Callable[..., Mesh],
):
    found = newest_checkpoint(OLD)
    assert found is not None
    assert (found.step, found.about) == (5, {"written by": "format 1"})
    state = small_state(5)
    for axes in LAYOUTS:
        assert same_bits(restore(found, abstract(state, mesh(**axes))), state)


def change_manifest(folder: Path, change: Callable[[dict], None]) -> None:
    """As another writer would have written it: the hash fits."""
    fields = json.loads((folder / MANIFEST).read_bytes())
    change(fields)
    text = json.dumps(fields).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / MANIFEST_HASH).write_bytes(hash_line(text))


def matrix(fields: dict) -> dict:
    return next(array for array in fields["arrays"] if array["path"] == "parameters/matrix")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: matrix(f)["pieces"][0].update(file="../x"), "names '../x', which is not a file"),
        (lambda f: matrix(f)["pieces"][0].update(offset_bytes=10**6), "cannot be read from"),
        (lambda f: matrix(f)["pieces"][0].update(start=[1]), "cannot be read from"),
        (lambda f: matrix(f)["pieces"].pop(), "its pieces do not make it up"),
    ],
)
def test_an_old_checkpoint_of_a_stranger_is_not_read_beyond_its_files(
    tmp_path: Path,
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    change: Callable,
    why: str,
):
    shutil.copytree(OLD, tmp_path / "old")
    change_manifest(tmp_path / "old" / "5", change)
    found = newest_checkpoint(tmp_path / "old")
    assert found is not None
    with pytest.raises(MeshwrightError, match=why):
        restore(found, abstract(small_state(5, fsdp=2)))


@pytest.mark.parametrize("change", [{"shape": [16, 8]}, {"dtype": "int32"}, {"path": "optimizer/matrix"}])
def test_a_manifest_that_says_other_than_the_arrays_is_an_error(
    checkpoints: Checkpoints, small_state: Callable[..., Any], tmp_path: Path, change: dict[str, Any]
):
    saved(checkpoints, small_state())
    change_manifest(tmp_path / "checkpoints" / "1", lambda fields: matrix(fields).update(change))
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    array = next(array for array in found.manifest.arrays if array.path.endswith("matrix"))
    with pytest.raises(MeshwrightError, match=r"matrix cannot be read from the checkpoint of step 1 in .*: "):
        _arrays.whole_array(found, array)


def orbax_reads(name: str, folder: Path, target: Any) -> Any:
    """The state as Orbax gives it that knows nothing of Meshwright; `target` None: as numpy arrays."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")
    if name == "checkpointer":
        return ocp.StandardCheckpointer().restore(folder / "state", target)
    with ocp.CheckpointManager(folder.parent, item_names=("state",)) as manager:
        assert manager.latest_step() == int(folder.name)
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return manager.restore(int(folder.name), args=wanted)["state"]


@pytest.mark.parametrize("reader", ["checkpointer", "manager"])
@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_orbax_reads_the_same_state_with_a_layout_and_without(
    checkpoints: Checkpoints,
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    same_bits: Callable[[Any, Any], bool],
    mesh: Callable[..., Mesh],
    monkeypatch: pytest.MonkeyPatch,
    reader: str,
):
    monkeypatch.setattr(_arrays, "CHUNK_BYTES", 100)
    state = small_state(5, fsdp=4, tensor=2)
    folder = saved(checkpoints, state).folder
    assert same_bits(orbax_reads(reader, folder, None), state)
    wanted = abstract(state, mesh(fsdp=8))
    read = orbax_reads(reader, folder, wanted)
    assert same_bits(read, state)
    assert jax.tree.map(lambda x: x.sharding, read) == jax.tree.map(lambda x: x.sharding, wanted)
