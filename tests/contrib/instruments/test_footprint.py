"""Bytes counted by hand, by each library's own attributes, and by addresses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.contrib.instruments import Storage, _footprint


def array_at(found, path):
    return next(array for array in found.arrays if array.path == path)


def test_elements_times_bytes_each():
    found = mw.footprint({"w": jnp.zeros((4, 8)), "half": jnp.zeros((4, 8), jnp.bfloat16)})
    assert found.total_bytes == 4 * 8 * 4 + 4 * 8 * 2
    assert found.by_device == {"cpu:0": {"fp32": 128, "bf16": 64}}


def test_views_of_numpy_share_the_storage_of_their_base():
    base = np.arange(16, dtype=np.int64).reshape(4, 4)
    found = mw.footprint([base, base[1], base.T, base[:, 1], np.broadcast_to(base[0], (5, 4))])
    assert found.total_bytes == base.nbytes
    assert [a.shares_storage_with for a in found.arrays] == [None, "[0]", "[0]", "[0]", "[0]"]
    assert [a.strides for a in found.arrays] == [(4, 1), (1,), (1, 4), (4,), (0, 1)]
    assert [a.offset_elements for a in found.arrays] == [0, 4, 0, 1, 0]
    assert [a.contiguous for a in found.arrays] == [True, True, False, False, False]


def test_who_is_the_view_does_not_depend_on_the_order():
    base = np.zeros((4, 4))
    found = mw.footprint({"a row": base[0], "base": base})
    assert [array.is_view for array in found.arrays] == [True, False]
    assert found.arrays[1].shares_storage_with == "['a row']"


def test_a_view_alone_keeps_its_whole_base_alive():
    base = np.zeros((100, 10), np.float32)
    (found,) = mw.footprint([base[3]]).arrays
    assert (found.num_bytes, found.storage_bytes, found.is_view) == (40, 4000, True)


def test_two_views_that_do_not_meet_are_one_base():
    base = np.zeros(100, np.float32)
    assert mw.footprint([base[:10], base[50:]]).total_bytes == 400


def test_parts_of_one_block_are_counted_byte_by_byte_and_are_the_first_arrays():
    random = np.random.default_rng(0)
    for _ in range(50):
        known, owners = _footprint._KnownMemory(), dict[int, str]()
        for name in "abcdefgh":
            low = int(random.integers(0, 50))
            high = low + int(random.integers(1, 14))
            storage = Storage(device="cpu", address=1000 + low, num_bytes=high - low, host=True)
            new = [place for place in range(low, high) if place not in owners]
            met = [owners[place] for place in range(low, high) if place in owners]
            assert known._new(name, storage) == (len(new), min(met, default=None))
            owners.update(dict.fromkeys(new, name))


def test_ten_thousand_arrays_are_counted():  # took 18 s while each was compared with each
    assert mw.footprint([np.zeros(3, np.float32) for _ in range(10_000)]).total_bytes == 120_000


def test_a_copy_has_a_storage_of_its_own():
    base = np.zeros((4, 4), np.float32)
    assert mw.footprint([base, np.ascontiguousarray(base.T)]).total_bytes == 128


def test_a_memory_map_counts_what_is_mapped(tmp_path):
    np.arange(10, dtype=np.int32).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", np.int32, "r")
    assert mw.footprint([tokens, tokens[2:5]]).total_bytes == 40


def test_scalars_and_empty_arrays_of_numpy_are_arrays():
    assert mw.footprint([np.float64(3), np.zeros((0, 4), np.float32)]).total_bytes == 8


def test_pythons_numbers_and_none_are_listed():
    found = mw.footprint({"step": 3, "rate": 0.1, "none": None, "on": True, "w": np.zeros(2, np.float32)})
    assert set(found.not_arrays) == {"step", "rate", "none", "on"}
    assert found.total_bytes == 8


def test_a_sharded_array_lies_in_parts_and_a_replicated_one_whole_on_each_device(mesh):
    devices = mesh(data=8)
    made = jax.jit(lambda: jnp.ones((16, 4)), out_shardings=NamedSharding(devices, PartitionSpec("data")))()
    whole = jax.jit(lambda: jnp.ones((16, 4)), out_shardings=NamedSharding(devices, PartitionSpec()))()
    found = mw.footprint({"split": made, "whole": whole})
    assert array_at(found, "split").storage_bytes == 256
    assert array_at(found, "whole").storage_bytes == 8 * 256
    assert found.total_bytes == 9 * 256
    assert found.by_device["cpu:7"] == {"fp32": 32 + 256}


def test_what_does_not_exist_yet_counts_what_it_would_take(mesh):
    split = NamedSharding(mesh(data=8), PartitionSpec("data"))
    abstract = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    assert mw.footprint(abstract).by_device == {"abstract": {"bf16": 2 * 2**20}}
    placed = mw.footprint(jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=split))
    assert placed.by_device["cpu:3"] == {"fp32": 32}
    assert placed.total_bytes == 256


def test_registered_classes_and_modules_of_flax_are_trees():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    state = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("State", ["step", "model"]), ["step", "model"], []
    )
    found = mw.footprint(state(0, nnx.Linear(3, 4, rngs=nnx.Rngs(0))))
    assert found.total_bytes == 4 * (3 * 4 + 4)
    assert found.not_arrays == ("step",)
    assert all(array.path.startswith("model.") for array in found.arrays)


def test_a_dict_whose_keys_do_not_sort_is_refused():
    with pytest.raises(mw.InputError, match="the tree cannot be walked") as caught:
        mw.footprint({0: np.zeros(1), "a": np.zeros(1)})
    assert "list(tree.values())" in caught.value.hint


def test_an_array_that_was_put_on_a_device_counts_there():
    put = jax.device_put(jnp.ones(3), jax.devices()[5])
    assert mw.footprint(put).by_device == {"cpu:5": {"fp32": 12}}


def test_random_keys_count_their_data():
    assert mw.footprint(jax.random.key(0)).total_bytes == 8  # two uint32


def test_arrays_without_elements_take_nothing():
    found = mw.footprint([jnp.zeros((0, 4)), np.zeros((0, 4))])
    assert found.total_bytes == 0
    assert [array.shares_storage_with for array in found.arrays] == [None, None]


def test_pytorchs_view_of_a_jax_array_counts_once():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    array = jnp.arange(64.0)
    view = torch.from_dlpack(array)
    assert view.data_ptr() == array.unsafe_buffer_pointer()
    found = mw.footprint([array, view])
    assert found.by_device == {"cpu:0": {"fp32": 256}}
    assert found.arrays[1].shares_storage_with == "[0]"


def test_libraries_that_share_memory_count_it_once():
    array = jnp.arange(64, dtype=jnp.float32)
    view = np.asarray(array)
    assert view.__array_interface__["data"][0] == array.unsafe_buffer_pointer()
    assert mw.footprint([array, view, view[8:16]]).total_bytes == 256


def test_a_deleted_array_is_refused_with_its_path():
    gone = jnp.ones(4)
    gone.delete()
    with pytest.raises(mw.InputError, match=r"state\.w is a jax array that was deleted or donated"):
        mw.footprint({"state": {"w": gone}})


class Odd:
    __module__ = "pandas.core"
    __array_interface__ = np.zeros(2).__array_interface__


@pytest.mark.parametrize(
    ("leaf", "words"), [("text", "builtins.str"), (Odd(), "pandas.core.Odd"), (object(), "builtins.object")]
)
def test_what_is_no_array_is_refused_with_its_path_and_type(leaf, words):
    with pytest.raises(mw.InputError, match=rf"layers\[1\] is a {words}, not an array of jax"):
        mw.footprint({"layers": [np.zeros(1), leaf]})


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_traced_value_has_no_bytes(transform):
    def traced(x):
        mw.footprint({"x": x})
        return x.sum()

    with pytest.raises(mw.InputError, match=r"x is a traced value .* it has a shape, but no bytes") as caught:
        transform(traced)(jnp.ones(3))
    assert "jax.eval_shape" in caught.value.hint


def test_it_reads_as_a_table():
    w = np.zeros((2, 3), np.float32)
    text = str(mw.footprint({"t": w.T, "w": w, "step": 3}))
    assert text.splitlines() == [
        "24 B in 2 arrays of numpy (cpu: fp32 24 B)",
        "  array  shape       size  strides  layout      storage",
        "  t      fp32[3, 2]  24 B  (1, 3)   strided     its own",
        "  w      fp32[2, 3]  24 B  (3, 1)   contiguous  that of t",
        "  numbers and None, without array memory: step",
    ]
    with_jax = str(mw.footprint([jnp.ones(2), w])).splitlines()
    assert with_jax[0] == "32 B in 2 arrays (cpu:0: fp32 8 B; cpu: fp32 24 B)"
    assert with_jax[1].split()[:2] == ["array", "library"]


def test_devices_that_hold_the_same_are_told_together(mesh):
    split = NamedSharding(mesh(data=8), PartitionSpec("data"))
    planned = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=split)
    assert (
        str(mw.footprint(planned)).splitlines()[0] == "256 B in 1 array of jax (8 devices, each: fp32 32 B)"
    )


def test_a_large_tree_shows_its_largest_arrays_in_lines_that_fit():
    tree = {f"model.layers.{n}.self_attention.query_projection.weight": np.zeros(n + 1) for n in range(100)}
    tree = {**tree, "tied": tree["model.layers.99.self_attention.query_projection.weight"]}
    lines = str(mw.footprint(tree)).splitlines()
    assert lines[-1] == "  and 41 arrays that are no larger"
    assert len(lines) == 1 + 1 + 60 + 1
    assert max(len(line) for line in lines) <= 110
    assert "'model.layers.99" in "\n".join(lines)


def test_eight_threads_get_the_same_answer(at_once):
    tree = {"w": jnp.ones((8, 8)), "v": np.zeros(3)}
    assert len({found.total_bytes for found in at_once(lambda: mw.footprint(tree))}) == 1


def test_pytorchs_views_strides_and_copies_by_its_own_attributes():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.zeros(4, 8)
    made = {"x": x, "row": x[1], "turned": x.T, "wide": x[:1].expand(5, 8), "copy": x.T.contiguous()}
    found = mw.footprint(made)
    assert found.total_bytes == 2 * 128
    for name, tensor in made.items():
        facts = array_at(found, name)
        assert facts.strides == tuple(tensor.stride())
        assert facts.contiguous == tensor.is_contiguous()
        assert facts.offset_elements == tensor.storage_offset()
        shares = tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        first = next(n for n in sorted(made) if n != "copy")  # the tree is walked in this order
        assert facts.shares_storage_with == (first if shares and name != first else None)


def test_a_module_counts_parameters_and_buffers_and_what_is_tied_once():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    first, last = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    found = mw.footprint(torch.nn.Sequential(first, torch.nn.BatchNorm1d(4), last))
    assert found.total_bytes == 64 + 4 * 16 + 8  # one matrix, four vectors, the count of batches
    assert array_at(found, "2.weight").shares_storage_with == "0.weight"


def test_pytorchs_memory_shared_with_numpy_counts_once():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    array = np.zeros(10, np.float32)
    assert mw.footprint([array, torch.from_numpy(array)[2:4]]).total_bytes == 40


def test_tensors_without_memory_are_of_the_device_meta():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = torch.zeros(1000, 1000, device="meta")
    assert mw.footprint([meta, meta[0]]).by_device == {"meta": {"fp32": 4_000_000}}
    with FakeTensorMode():
        fake = torch.zeros(10)
    assert mw.footprint(fake).by_device == {"meta": {"fp32": 40}}


def test_a_layout_without_one_storage_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(mw.InputError, match=r"layers\[0\] is a torch tensor that is sparse_coo"):
        mw.footprint({"layers": [torch.eye(3).to_sparse()]})


def test_a_torch_optimizer_is_counted_by_its_state_dict():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert mw.footprint(optimizer.state_dict()).total_bytes == 2 * 4 * (4 + 2) + 2 * 4  # and two counts
    with pytest.raises(mw.InputError, match=r"torch\.optim\.adam\.Adam, not an array") as caught:
        mw.footprint(optimizer)
    assert caught.value.hint == "give its state_dict()"
    with pytest.raises(mw.InputError, match="the tree cannot be walked"):
        mw.footprint(optimizer.state)  # its keys are tensors
