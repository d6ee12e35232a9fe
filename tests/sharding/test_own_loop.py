"""Sharding errors in a training loop of a user's own, provoked in one process and in two real ones."""

import json
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.sharding import mesh_of

# Each case in a process of its own devices: four of the mesh's eight are here, four with the other.
TWO = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=60)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import meshwright as mw

mesh = Mesh(np.array(jax.devices()), ("data",))
mine = Mesh(np.array(jax.local_devices()), ("data",))
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
rows = np.arange(12, dtype="float32").reshape(4, 3) + jax.process_index()  # no two processes have the same
eight = np.concatenate([rows, rows])
w = jax.device_put(np.ones(3, "float32"), whole)
step = jax.jit(lambda params, batch: batch @ params["w"], in_shardings=({"w": whole}, split))
mapped = jax.jit(jax.shard_map(lambda batch: batch, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
cases = {
    "jit": (lambda batch: step({"w": w}, batch), rows),
    "jit of numpy": (lambda batch: step({"w": w}, batch), eight),
    "shard_map": (mapped, rows),
    "device_put": (lambda batch: jax.device_put(batch, split), rows),
    "device_put of unlike": (lambda batch: jax.device_put(batch, split), eight),
    "devices of one process": (
        jax.jit(lambda params, batch: batch @ params["w"]).__call__,
        jax.device_put(rows, NamedSharding(mine, P("data"))),
    ),
    "too few rows": (lambda batch: jax.make_array_from_process_local_data(split, batch, (16, 3)), rows),
    "converted": (
        lambda batch: step({"w": w}, jax.make_array_from_process_local_data(split, batch)).shape, rows
    ),
}
told = {}
for name, (run, batch) in cases.items():
    given = ({"w": w}, batch) if name == "devices of one process" else (batch,)
    try:
        with mw.sharding_errors(mesh, params={"w": w}, batch=batch):
            told[name] = run(*given)
    except mw.InputError as error:
        told[name] = (error.message, error.hint)
print("TOLD", json.dumps(told))
"""
CONVERSION = (
    "jax.make_array_from_process_local_data(sharding, rows), or "
    "jax.experimental.multihost_utils.host_local_array_to_global_array(rows, mesh, spec)"
)


@pytest.fixture(scope="module")
def told():
    """What each case of `TWO` was told, in the first of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said[0][1][-2000:] + said[1][1][-2000:]
    lines = [line for line in said[0][0].splitlines() if line.startswith("TOLD ")]
    return json.loads(lines[0].removeprefix("TOLD "))


@pytest.mark.parametrize(
    ("case", "who"),
    [
        ("jit", "batch (4, 3)"),
        ("shard_map", "shard_map's argument batch float32[4,3]"),
        ("device_put", "batch (4, 3)"),
    ],
)
def test_rows_of_one_process_that_do_not_divide_are_told_what_makes_them_global(told, case, who):
    message, hint = told[case]
    assert message.startswith(f"{who}: dimension 0 = 4 does not divide over data = 8\n  in JAX's words: ")
    assert hint == (
        "use data = 4, or a dimension of 8; if these are the rows that one of 2 processes has read, "
        f"the global array has 8: {CONVERSION}"
    )


def test_rows_of_one_process_that_do_divide_are_told_too(told):
    rows = f"if these are the rows that this process has read, make them global first: {CONVERSION}"
    message, hint = told["jit of numpy"]
    assert "a NumPy array float32[8,3] of one process is passed as if it were the global one" in message
    assert hint == rows
    message, hint = told["device_put of unlike"]
    assert "the processes place different arrays as if each were the whole, global one" in message
    assert hint == rows


def test_rows_on_the_devices_of_one_process_alone_are_told_so(told):
    message, hint = told["devices of one process"]
    assert "with shape float32[3] and on 8 devices" in message
    assert "with shape float32[4,3] and on 4 devices" in message
    assert "place both on the mesh that the function is given (data=8)" in hint
    assert hint.endswith(CONVERSION)


def test_a_global_shape_that_this_process_has_too_few_rows_for(told):
    message, hint = told["too few rows"]
    assert message.startswith(
        "this process gives 4 elements of dimension 0 of a global array (16, 3); its devices hold 8"
    )
    assert hint == "give 8 elements in each process, or leave global_shape out: it is then computed"


def test_the_conversion_that_is_named_works(told):
    assert told["converted"] == [8]


def test_in_one_process_no_other_is_spoken_of():
    mesh = mesh_of((("data", 4), ("tensor", 2)), jax.devices())
    params = {"up": jnp.ones((10, 6)), "down": jnp.ones((6, 10))}
    split = NamedSharding(mesh, PartitionSpec("data"))
    with pytest.raises(mw.InputError) as error, mw.sharding_errors(mesh, params=params):
        jax.device_put(params, {"up": split, "down": NamedSharding(mesh, PartitionSpec())})
    assert error.value.message.startswith(
        "params['up'] (10, 6): dimension 0 = 10 does not divide over data = 4\n  in JAX's words: "
    )
    assert error.value.hint == "use data = 2 or 5, or a dimension of 8 or 12"
    assert "IndivisibleError" in repr(error.value.__cause__)


def test_other_errors_pass_as_they_are():
    mesh = mesh_of((("data", 8),), jax.devices())
    with pytest.raises(ZeroDivisionError), mw.sharding_errors(mesh, batch=np.ones(8), note="no array"):
        _ = 1 / 0
