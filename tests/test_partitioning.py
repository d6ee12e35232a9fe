"""The compiler asks the user's own process how a `custom_partitioning` call is partitioned."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.compiler import fingerprint_of, read_text

ROWS, WIDTH = 512, 64


def scaled(factor):
    """Return rows -> factor * rows, partitioned so that each device scales its own rows."""

    @custom_partitioning
    def call(rows):
        return factor * rows

    def partition(mesh, arguments, result):
        return mesh, lambda rows: factor * rows, result.sharding, (arguments[0].sharding,)

    call.def_partition(partition, sharding_rule="i j -> i j")
    return call


def arguments(here):
    split = NamedSharding(here, PartitionSpec("data"))
    return jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=split), jax.ShapeDtypeStruct(
        (WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(here, PartitionSpec())
    )


@pytest.mark.parametrize("fleet", ["8xH100", "8xCPU"])
def test_a_users_rule_partitions_the_call(fleet, mesh, forked_workers):
    def step(rows, w):
        return jnp.sum(scaled(3.0)(rows) @ w)

    weighed = mw.weigh(mw.jax_step(step, *arguments(mesh(data=8))), on=fleet)
    assert weighed.ledger.flops.model == weighed.ledger.flops.executed == 2 * ROWS * WIDTH * WIDTH
    assert weighed.ledger.unpriced == ()
    sums = sum(each.payload_bytes for each in weighed.ledger.traffic)
    assert sums <= 64, "each device has the rows of its own call: only the loss is summed"


def attention(query, key, value):
    return jnp.sum(
        jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    ).astype(jnp.float32)


HEADS = (8, 256, 4, 64)  # batch, sequence, heads, head_dim


def test_cudnn_attention_is_the_program_that_its_name_has(mesh, monkeypatch, tmp_path, forked_workers):
    (tmp_path / "attending.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "def attention(query, key, value):\n"
        "    return jnp.sum(jax.nn.dot_product_attention(query, key, value, is_causal=True,"
        " implementation='cudnn')).astype(jnp.float32)\n"
        "def program(mesh):\n"
        f"    heads = jax.ShapeDtypeStruct({HEADS}, jnp.bfloat16, sharding=NamedSharding(mesh, P('data')))\n"
        "    return jax.grad(attention, (0, 1, 2)), (heads,) * 3\n"
    )
    monkeypatch.chdir(tmp_path)
    named = mw.weigh("attending:program", on="8xH100")
    split = NamedSharding(mesh(data=8), PartitionSpec("data"))
    heads = jax.ShapeDtypeStruct(HEADS, jnp.bfloat16, sharding=split)
    live = mw.weigh(mw.jax_step(jax.grad(attention, (0, 1, 2)), *((heads,) * 3)), on="8xH100")
    batch, length, num_heads, width = HEADS
    product = 2 * batch * num_heads * length * length * width // 2  # the causal half
    assert live.ledger.flops.model == 6 * product
    assert live.ledger.flops.by_phase == named.ledger.flops.by_phase
    assert live.ledger.flops.executed == named.ledger.flops.executed
    programs = [fingerprint_of(read_text(each.folder, "program.hlo.txt")) for each in (live, named)]
    assert programs[0] == programs[1]


def test_another_rule_is_another_program(mesh, forked_workers, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    given = arguments(mesh(data=8))

    def weigh(factor):
        call = scaled(factor)
        return mw.weigh(mw.jax_step(lambda rows, w: call(rows) @ w, *given), on="8xH100")

    first, second, again = weigh(3.0), weigh(4.0), weigh(3.0)
    assert not second.cached
    assert again.cached
    assert again.compiled == first.compiled


def test_a_rule_that_fails_is_told_with_its_own_words(mesh, forked_workers):
    @custom_partitioning
    def call(rows):
        return rows + 1

    def partition(mesh, arguments, result):
        raise RuntimeError("no such tiling")

    call.def_partition(partition, sharding_rule="i j -> i j")
    with pytest.raises(mw.CompileError, match="no such tiling"):
        mw.weigh(mw.jax_step(lambda rows, w: call(rows) @ w, *arguments(mesh(data=8))), on="8xH100")


def test_an_abstract_mesh_is_not_enough(forked_workers):
    here = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(mw.InputError, match="jax_num_cpu_devices"):
        mw.weigh(mw.jax_step(lambda rows, w: scaled(2.0)(rows) @ w, *arguments(here)), on="8xH100")
