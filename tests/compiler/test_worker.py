"""What the worker says of our own steps, compiled for eight H100 that are not there; all figures by hand.

The program: 4 layers of width 256 (4 heads of 64, MLP of 512), 1024 tokens, 16 sequences of 128, bf16.
"""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshwright.compiler import accepted_options, compile_program, requested_options
from meshwright.errors import CompileError
from meshwright.worker import device_coordinates

OVERRIDES = (
    "precision=bf16",
    "data.source=synthetic",
    "model.num_layers=4",
    "model.embed_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.mlp_dim=512",
    "model.vocab_size=1024",
    "batch.sequences=16",
    "batch.sequence_length=128",
)
LAYER = 4 * 256 * 256 + 3 * 256 * 512  # query, key, value, output; gate, up, down
LAYERS, TABLE, NORM = 4 * LAYER, 1024 * 256, 256
TOKENS = 16 * 128
SCALARS = 2048  # a loss, a norm of gradients, a few statistics


@pytest.fixture(scope="module")
def on_fsdp(weighed):
    return weighed("bytes-nano", "8xH100", "fsdp=8", *OVERRIDES)


@pytest.fixture(scope="module")
def on_fsdp_and_tensor(weighed):
    return weighed("bytes-nano", "8xH100", "fsdp=4,tensor=2", *OVERRIDES)


def payload_of(found):
    """Bytes of results per device and step, by kind and axes."""
    payload = Counter()
    for collective in found.ledger.traffic:
        payload[collective.kind, collective.axes] += collective.payload_bytes
    return payload


def test_the_traffic_of_fsdp_is_what_the_layout_asks_for(on_fsdp):
    payload = payload_of(on_fsdp)
    # Weights cross in bf16: layers for the forward and again for the backward pass, both tables once (the
    # loss makes the head's gradient beside itself). Norms cross in fp32: two a layer, twice; the last, once.
    gathered = 2 * (2 * LAYERS) + 2 * (2 * TABLE) + 4 * (2 * 4 * 2 * NORM + NORM)
    assert payload.pop(("all-gather", ("fsdp",))) == pytest.approx(gathered, rel=0.01)
    # A device keeps an eighth of each gradient. That of the embedding comes another way: each device
    # is sent its columns of every token's gradient and adds them up into its own shard.
    scattered = (2 * LAYERS + 2 * TABLE + 4 * (4 * 2 * NORM + NORM)) / 8
    assert payload.pop(("reduce-scatter", ("fsdp",))) == pytest.approx(scattered, rel=0.01)
    assert payload.pop(("all-to-all", ("fsdp",)), 0) <= 2 * TOKENS * 256 / 8
    assert payload.pop(("all-reduce", ("fsdp",))) <= SCALARS
    assert not payload


def test_the_traffic_of_fsdp_and_tensor_is_what_the_layout_asks_for(on_fsdp_and_tensor):
    payload = payload_of(on_fsdp_and_tensor)
    norms = 4 * (2 * 4 * 2 * NORM + NORM)  # whole on either half of `tensor`
    gathered = (2 * (2 * LAYERS) + 2 * (2 * TABLE)) / 2 + norms
    assert payload.pop(("all-gather", ("fsdp",))) == pytest.approx(gathered, rel=0.01)
    # The embedding's gradient goes by columns, over `tensor` gathered first.
    scattered = (2 * LAYERS + 2 * TABLE) / 2 / 4
    assert payload.pop(("reduce-scatter", ("fsdp",))) == pytest.approx(scattered, rel=0.01)
    assert payload.pop(("all-to-all", ("fsdp",)), 0) <= 2 * TOKENS * 256 / 4
    # The residual of this quarter of the batch, bf16. Gathered before each block's two halves, forward and
    # again backward, and for the gradient of what each half adds; once for the loss and once for the
    # embedding's gradient. Scattered after each half, as are their inputs' gradients; and the embedding.
    residual = 2 * TOKENS // 4 * 256
    assert payload.pop(("all-gather", ("tensor",))) == pytest.approx((6 * 4 + 2) * residual, rel=0.01)
    assert payload.pop(("reduce-scatter", ("tensor",))) <= 1.01 * (4 * 4 + 2) * residual / 2
    # The loss: each position's greatest logit, its mass and the target's, fp32; its input's gradient.
    # (XLA of jaxlib 0.12 reduces a fourth array of that size.)
    assert payload.pop(("all-reduce", ("tensor",))) <= 4 * 4 * TOKENS / 4 + residual
    # The norms' gradients are sums over both axes.
    assert payload.pop(("all-reduce", ("fsdp", "tensor"))) <= 4 * (4 * 2 * NORM + NORM) + SCALARS
    assert payload.pop(("all-reduce", ("fsdp",))) <= SCALARS
    assert not payload


def test_most_of_the_traffic_may_run_beside_computation(on_fsdp):
    assert (
        sum(c.overlapped_count for c in on_fsdp.ledger.traffic)
        >= sum(c.count for c in on_fsdp.ledger.traffic) / 2
    )


@pytest.mark.parametrize("layout", ["on_fsdp", "on_fsdp_and_tensor"])
def test_flops_with_cudnns_attention_are_the_closed_form(layout, request):
    """The target computes attention by cuDNN's causal kernel, which makes its scores again."""
    flops = request.getfixturevalue(layout).ledger.flops
    model = 6 * (LAYERS + TABLE) * TOKENS + 6 * TOKENS * 128 * 256 * 4
    again = 4 * TOKENS * 128 * 256
    assert flops.model == model
    assert flops.recomputed == again
    assert flops.executed == model + again
    assert set(flops.by_format) == {"bf16"}


def test_the_arguments_are_the_sharded_state_and_the_batch(on_fsdp_and_tensor):
    found = on_fsdp_and_tensor.compiled
    matrices, norms = 4 * (LAYERS + 2 * TABLE) / 8, 4 * (4 * 2 * NORM + NORM) / 4
    by_role = Counter()
    for argument in found.arguments:
        by_role[argument.role] += argument.device_bytes
    assert by_role == {
        "parameters": matrices + norms,
        "optimizer_state": 2 * (matrices + norms) + 4,  # a count of steps
        "keys": 8,
        "step": 4,
        "batch": 4 * 4 * 129,
    }
    moments = Counter(a.moment for a in found.arguments)
    assert moments["mu"] == moments["nu"] == sum(a.role == "parameters" for a in found.arguments)
    assert found.reported_bytes["argument"] == by_role.total()
    assert found.reported_bytes["alias"] == by_role.total() - by_role["batch"]  # all of the state is donated


def test_the_record_says_what_was_compiled_for_what_by_what(on_fsdp):
    found = on_fsdp.compiled
    assert (found.name, found.fleet, found.platform, found.num_devices) == ("bytes-nano", "8xH100", "cuda", 8)
    assert found.source == "target compiler"
    assert found.mesh_axes == (("fsdp", 8),)
    assert found.num_matmul_parameters == LAYERS + TABLE
    assert found.num_parameters == LAYERS + 2 * TABLE + 4 * 2 * NORM + NORM
    assert (found.tokens_per_step, found.sequence_length) == (TOKENS, 128)
    assert found.compiler == f"XLA (cuda) of jax-cuda13-pjrt {found.versions['jax-cuda13-pjrt']}"
    assert (
        found.options
        == accepted_options(requested_options("cuda", [("fsdp", 8)]), jax.jit(lambda x: x).lower(0.0)).options
    )
    assert found.compile_seconds > 0


def test_rows_have_tokens_per_step_but_no_sequence(weighed):
    found = weighed("linear", "1xCPU", "data=-1").compiled
    assert (found.tokens_per_step, found.sequence_length) == (64, None)
    assert found.source == "target compiler"
    assert found.compiler.startswith("XLA (cpu) of jaxlib ")


def test_a_target_that_the_compiler_does_not_accept(request_for):
    request = request_for("linear", "8xH100", "data=-1")
    broken = dataclasses.replace(request, topology={**request.topology, "target_config": "no chip"})
    with pytest.raises(CompileError, match="the cuda compiler did not accept 8xH100: ") as error:
        compile_program(broken)
    assert error.value.hint == "`meshwright doctor` shows which compile targets this machine has"


def test_a_program_that_the_compiler_refuses_brings_the_compilers_words(request_for, tmp_path):
    (tmp_path / "unknown_call.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def train_step(mesh):\n"
        "    x = jax.ShapeDtypeStruct((4,), jnp.float32)\n"
        "    return lambda x: jax.ffi.ffi_call('somebodys_kernel', x)(x), (x,)\n"
    )
    request = request_for("unknown_call:train_step", "1xCPU", "data=1", search_path=(str(tmp_path),))
    with pytest.raises(
        CompileError, match=r"could not compile unknown_call:train_step for 1xCPU: .*somebodys_kernel"
    ):
        compile_program(request)


def test_tpus_say_where_they_lie():
    tpus = [SimpleNamespace(coords=[x, y, 0], core_on_chip=0) for y in (0, 1) for x in (0, 1)]
    mesh = SimpleNamespace(devices=np.array(tpus).reshape(2, 2))
    assert device_coordinates(mesh) == ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0))
