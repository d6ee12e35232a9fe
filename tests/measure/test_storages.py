import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshwright.errors import InputError
from meshwright.measure._storages import buffers_of, facts_of, format_name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "fp32"),
        (jnp.bfloat16.dtype, "bf16"),
        ("torch.float8_e4m3fn", "fp8-e4m3"),
        ("int64", "int64"),
    ],
)
def test_formats_have_our_names_and_other_types_their_own(dtype, name):
    assert format_name(dtype) == name


def test_numpys_strides_count_elements_not_bytes():
    array = np.zeros((3, 5), np.float64)[:, ::2]
    facts = facts_of(array, "a")
    assert facts.strides == tuple(stride // 8 for stride in array.strides)
    assert facts.storages[0].num_bytes == 3 * 5 * 8


def test_a_negative_stride_begins_at_the_end():
    facts = facts_of(np.arange(4, dtype=np.int32)[::-1], "a")
    assert (facts.strides, facts.offset_elements) == ((-1,), 3)


def test_a_jax_array_has_the_address_that_its_runtime_gives():
    array = jnp.ones((2, 2))
    (storage,) = facts_of(array, "a").storages
    assert (storage.address, storage.num_bytes) == (array.unsafe_buffer_pointer(), 16)


def test_a_window_that_numpy_strides_over_itself_keeps_the_whole_array_alive():
    base = np.arange(10, dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(base, 3)
    facts = facts_of(windows, "a")
    assert facts.storages == facts_of(base, "a").storages
    assert (facts.shape, facts.strides, facts.num_bytes, facts.is_view) == ((8, 3), (1, 1), 96, True)
    once = np.lib.stride_tricks.as_strided(base, (3, 3), (8, 4))
    assert facts_of(once, "a").storages == facts.storages
    assert facts_of(once, "a").strides == (2, 1)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_an_array_over_a_part_of_a_buffer_keeps_all_of_it_alive(kind):
    part = np.frombuffer(kind(400), np.int32, count=10, offset=8)
    facts = facts_of(part, "a")
    assert (facts.storages[0].num_bytes, facts.num_bytes, facts.offset_elements) == (400, 40, 2)


def test_a_field_of_a_structure_has_no_strides_in_its_elements():
    table = np.zeros(3, [("a", "i4"), ("b", "f8")])
    assert facts_of(table, "a").format == "structured"
    assert facts_of(table, "a").num_bytes == 3 * 12
    field = facts_of(table["b"], "a")
    assert (field.format, field.strides, field.offset_elements) == ("fp64", None, None)
    assert (field.num_bytes, field.storages[0].num_bytes, field.contiguous) == (24, 36, False)


def test_an_array_of_numpy_that_may_not_be_written_is_as_any():
    array = np.zeros(4)
    array.flags.writeable = False
    assert facts_of(array, "a").storages[0].num_bytes == 32
    assert not facts_of(array, "a").is_view


def test_pythons_objects_in_an_array_are_refused():
    with pytest.raises(InputError, match="a is an array of numpy of dtype object: it holds addresses"):
        facts_of(np.array([1, "b"], object), "a")


def test_a_masked_array_is_refused():
    with pytest.raises(InputError, match="a is an array of numpy with a mask") as caught:
        facts_of(np.ma.zeros(3), "a")
    assert caught.value.hint == "give its .data and its .mask"


def test_a_class_that_is_no_pytree_yet_is_told_how_to_become_one():
    made = dataclasses.make_dataclass("State", ["w"])
    with pytest.raises(InputError, match="State: no array") as caught:
        facts_of(made(jnp.ones(2)), "a")
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
    facts = facts_of(made(), "a")
    assert facts.format == name
    assert made.memory_analysis().output_size_in_bytes == num_bytes
    assert facts.num_bytes == facts.storages[0].num_bytes == num_bytes
    planned = facts_of(jax.ShapeDtypeStruct((1001,), dtype), "a")
    assert planned.num_bytes == planned.storages[0].num_bytes == num_bytes


def test_two_numbers_of_four_bits_lie_in_a_byte():
    array = jnp.array([1, 2, 3, 4], jnp.int4)
    first = ctypes.c_ubyte * 2
    assert bytes(first.from_address(array.unsafe_buffer_pointer())) == b"\x21\x43"


def test_numpy_gives_a_number_of_four_bits_a_byte():
    assert facts_of(np.zeros(17, jnp.int4), "a").num_bytes == 17


def test_an_odd_shard_of_four_bit_numbers_is_rounded_up_on_each_device(mesh):
    split = NamedSharding(mesh(data=8), PartitionSpec("data"))
    made = jax.jit(lambda: jnp.zeros((8, 3), jnp.int4), out_shardings=split).lower().compile()
    assert made.memory_analysis().output_size_in_bytes == 2  # of one device
    assert [storage.num_bytes for storage in facts_of(made(), "a").storages] == [2] * 8


def test_keys_that_do_not_exist_yet_count_as_those_that_do():
    keys = jax.random.split(jax.random.key(0), 3)
    made, planned = facts_of(keys, "a"), facts_of(jax.ShapeDtypeStruct(keys.shape, keys.dtype), "a")
    assert (made.shape, made.format, made.num_bytes) == ((3, 2), "uint32", 24)
    assert (planned.shape, planned.format, planned.num_bytes) == ((3, 2), "uint32", 24)


def test_an_array_in_another_memory_of_its_device_says_which():
    device = jax.devices()[1]
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    (storage,) = facts_of(jax.device_put(jnp.ones(4), pinned), "a").storages
    assert storage.device == "cpu:1 pinned_host"
    planned = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=pinned)
    assert facts_of(planned, "a").storages[0].device == "cpu:1 pinned_host"
    assert facts_of(jax.device_put(jnp.ones(4), device), "a").storages[0].device == "cpu:1"


def test_an_array_that_another_thread_deleted_has_no_buffers():
    array = jnp.ones(3) + 1
    assert [num_bytes for _, _, num_bytes in buffers_of(array)] == [12]
    array.delete()
    assert buffers_of(array) == []


def test_numpy_over_pytorchs_memory_keeps_its_storage_alive():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.arange(10.0)
    facts = facts_of(tensor[2:4].numpy(), "a")
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
    with pytest.raises(InputError, match=f"a is a torch tensor that is {words}: no one") as caught:
        facts_of(make(torch), "a")
    assert caught.value.hint == f"give its parts, or {hint}"


def test_a_value_inside_pytorchs_own_transforms_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def looked_at(x):
        facts_of(x, "a")
        return x.sum()

    for transform in (torch.func.vmap, torch.func.grad):
        with pytest.raises(InputError, match="a is a torch Tensor without a storage of its own"):
            transform(looked_at)(torch.ones(3))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_that_waits_for_its_shape_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(InputError, match="a is a torch UninitializedParameter without a storage") as caught:
        facts_of(torch.nn.LazyLinear(3).weight, "a")
    assert "after the first call of a lazy module" in caught.value.hint
