import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import meshwright as mw
from meshwright.contrib.instruments import ArrayFootprint
from meshwright.errors import InputError


def alone(array) -> ArrayFootprint:
    (found,) = mw.footprint({"a": array}).arrays
    return found


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "fp32"),
        (jnp.bfloat16, "bf16"),
        (jnp.float8_e4m3fn, "fp8-e4m3"),
        ("int64", "int64"),
    ],
)
def test_formats_have_our_names_and_other_types_their_own(dtype, name):
    assert alone(np.zeros(3, dtype)).format == name


def test_numpys_strides_count_elements_not_bytes():
    array = np.zeros((3, 5), np.float64)[:, ::2]
    facts = alone(array)
    assert facts.strides == tuple(stride // 8 for stride in array.strides)
    assert facts.storages[0].num_bytes == 3 * 5 * 8


def test_a_negative_stride_begins_at_the_end():
    facts = alone(np.arange(4, dtype=np.int32)[::-1])
    assert (facts.strides, facts.offset_elements) == ((-1,), 3)


def test_a_jax_array_has_the_address_that_its_runtime_gives():
    array = jnp.ones((2, 2))
    (storage,) = alone(array).storages
    assert (storage.address, storage.num_bytes) == (array.unsafe_buffer_pointer(), 16)


def test_a_window_that_numpy_strides_over_itself_keeps_the_whole_array_alive():
    base = np.arange(10, dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(base, 3)
    facts = alone(windows)
    assert facts.storages == alone(base).storages
    assert (facts.shape, facts.strides, facts.num_bytes, facts.is_view) == ((8, 3), (1, 1), 96, True)
    once = np.lib.stride_tricks.as_strided(base, (3, 3), (8, 4))
    assert alone(once).storages == facts.storages
    assert alone(once).strides == (2, 1)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_an_array_over_a_part_of_a_buffer_keeps_all_of_it_alive(kind):
    part = np.frombuffer(kind(400), np.int32, count=10, offset=8)
    facts = alone(part)
    assert (facts.storages[0].num_bytes, facts.num_bytes, facts.offset_elements) == (400, 40, 2)


def test_a_field_of_a_structure_has_no_strides_in_its_elements():
    table = np.zeros(3, [("a", "i4"), ("b", "f8")])
    assert alone(table).format == "structured"
    assert alone(table).num_bytes == 3 * 12
    field = alone(table["b"])
    assert (field.format, field.strides, field.offset_elements) == ("fp64", None, None)
    assert (field.num_bytes, field.storages[0].num_bytes, field.contiguous) == (24, 36, False)


def test_an_array_of_numpy_that_may_not_be_written_is_as_any():
    array = np.zeros(4)
    array.flags.writeable = False
    assert alone(array).storages[0].num_bytes == 32
    assert not alone(array).is_view


def test_pythons_objects_in_an_array_are_refused():
    with pytest.raises(InputError, match="a is an array of numpy of dtype object: it holds addresses"):
        alone(np.array([1, "b"], object))


def test_a_masked_array_is_refused():
    with pytest.raises(InputError, match="a is a masked array of numpy") as caught:
        alone(np.ma.zeros(3))
    assert caught.value.hint == "give its .data and its .mask"


def test_a_class_that_is_no_pytree_yet_is_told_how_to_become_one():
    made = dataclasses.make_dataclass("State", ["w"])
    with pytest.raises(InputError, match="State, not an array") as caught:
        alone(made(jnp.ones(2)))
    assert caught.value.hint == "make its class a pytree: jax.tree_util.register_dataclass(State)"


@pytest.mark.parametrize(
    ("dtype", "name", "num_bytes"),
    [
        ("int2", "int2", 251),
        ("int4", "int4", 501),
        ("uint4", "uint4", 501),
        ("float4_e2m1fn", "fp4-e2m1", 501),
    ],
)
def test_numbers_of_less_than_a_byte_take_what_the_compiler_gives_them(dtype, name, num_bytes):
    """Jaxlib 0.10 itself says a byte each, `nbytes` too; its programs and its buffers pack them."""
    made = jax.jit(lambda: jnp.zeros(1001, dtype)).lower().compile()
    facts = alone(made())
    assert facts.format == name
    assert made.memory_analysis().output_size_in_bytes == num_bytes
    assert facts.num_bytes == facts.storages[0].num_bytes == num_bytes
    planned = alone(jax.ShapeDtypeStruct((1001,), dtype))
    assert planned.num_bytes == planned.storages[0].num_bytes == num_bytes


def test_two_numbers_of_four_bits_lie_in_a_byte():
    array = jnp.array([1, 2, 3, 4], jnp.int4)
    first = ctypes.c_ubyte * 2
    assert bytes(first.from_address(array.unsafe_buffer_pointer())) == b"\x21\x43"


def test_numpy_gives_a_number_of_four_bits_a_byte():
    assert alone(np.zeros(17, jnp.int4)).num_bytes == 17


def test_an_odd_shard_of_four_bit_numbers_is_rounded_up_on_each_device(mesh):
    split = NamedSharding(mesh(data=8), PartitionSpec("data"))
    made = jax.jit(lambda: jnp.zeros((8, 3), jnp.int4), out_shardings=split).lower().compile()
    assert made.memory_analysis().output_size_in_bytes == 2  # of one device
    assert [storage.num_bytes for storage in alone(made()).storages] == [2] * 8


def test_keys_that_do_not_exist_yet_count_as_those_that_do():
    keys = jax.random.split(jax.random.key(0), 3)
    made, planned = alone(keys), alone(jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    assert (made.shape, made.format, made.num_bytes) == ((3, 2), "uint32", 24)
    assert (planned.shape, planned.format, planned.num_bytes) == ((3, 2), "uint32", 24)


def test_an_array_in_another_memory_of_its_device_says_which():
    device = jax.devices()[1]
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    (storage,) = alone(jax.device_put(jnp.ones(4), pinned)).storages
    assert storage.device == "cpu:1 pinned_host"
    planned = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=pinned)
    assert alone(planned).storages[0].device == "cpu:1 pinned_host"
    assert alone(jax.device_put(jnp.ones(4), device)).storages[0].device == "cpu:1"


def test_an_array_that_another_thread_deleted_has_no_buffers(monkeypatch):
    array = jnp.ones(3) + 1
    monkeypatch.setattr(jax, "live_arrays", lambda: [array])  # as listed before the other thread's turn
    assert mw.live().total_bytes == 12
    array.delete()
    assert mw.live().total_bytes == 0


def test_numpy_over_pytorchs_memory_keeps_its_storage_alive():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.arange(10.0)
    facts = alone(tensor[2:4].numpy())
    assert facts.storages[0].address == tensor.untyped_storage().data_ptr()
    assert (facts.storages[0].num_bytes, facts.offset_elements, facts.is_view) == (40, 2, True)


@pytest.mark.filterwarnings("ignore")  # PyTorch is about to remove two of these kinds
@pytest.mark.parametrize(
    ("make", "words", "hint"),
    [
        (lambda torch: torch.eye(3).to_sparse(), "sparse_coo", "tensor.to_dense()"),
        (
            lambda torch: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
            "quantized",
            "tensor.dequantize()",
        ),
        (
            lambda torch: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            "nested",
            "torch.nested.to_padded_tensor(tensor, 0.0)",
        ),
    ],
)
def test_a_tensor_that_is_no_one_storage_is_refused(make, words, hint):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(InputError, match=f"a is a torch tensor that is {words}: it has no single") as caught:
        alone(make(torch))
    assert caught.value.hint == f"give its parts, or {hint}"


def test_a_value_inside_pytorchs_own_transforms_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def looked_at(x):
        alone(x)
        return x.sum()

    for transform in (torch.func.vmap, torch.func.grad):
        with pytest.raises(InputError, match="a is a torch Tensor without a storage of its own"):
            transform(looked_at)(torch.ones(3))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_that_waits_for_its_shape_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(InputError, match="a is a torch UninitializedParameter without a storage") as caught:
        alone(torch.nn.LazyLinear(3).weight)
    assert "after the first call of a lazy module" in caught.value.hint
