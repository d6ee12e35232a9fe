import importlib.util
import json
import os
import subprocess
import sys

import pytest

from meshwright.errors import InputError
from meshwright.hardware import (
    CATALOG,
    Fleet,
    pool_bytes,
    target_config,
    target_topology,
    topology_arguments,
)

OLD = ("V100-16GB",)
TARGETS = [c.name for c in CATALOG.values() if c.target and c.name not in OLD]
FRACTION = 0.9

# In its own process, so that no test process ever loads the plugin. For each target: a matmul for two
# devices, then one whose argument alone is larger than the chip, of which XLA says what its limit is.
COMPILE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
for name, (arguments, huge) in json.load(sys.stdin).items():
    devices = topologies.get_topology_desc(**arguments).devices
    mesh = Mesh(np.array(devices), ("data",))
    split = NamedSharding(mesh, P("data"))
    def array(*shape): return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
    square = array(256, 256)
    text = jax.jit(lambda a, b: a @ b).trace(square, square).lower().compile().as_text()
    print("compiling", name, file=sys.stderr, flush=True)
    jax.jit(jnp.sum).trace(array(huge)).lower().compile()
    print(json.dumps([name, devices[0].device_kind, len(devices), "all-gather" in text]))
"""

TOPOLOGY = """
import json, sys
from jax.experimental import topologies
for name, arguments in json.load(sys.stdin).items():
    devices = topologies.get_topology_desc(**arguments).devices
    print(json.dumps([name, devices[0].device_kind, len(devices), len({d.process_index for d in devices})]))
"""


def in_a_process(program: str, given: object) -> tuple[list[list], str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(given),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_xla_compiles_for_every_target_and_schedules_for_the_pool():
    fleets = {name: Fleet.parse(f"1x2x{name}") for name in TARGETS}
    assert len(fleets) == 12
    given = {n: (topology_arguments(f, FRACTION), f.chip.memory_bytes // 2 * 2) for n, f in fleets.items()}
    compiled, talk = in_a_process(COMPILE, given)
    assert compiled == [[n, f.chip.device_kinds[0], 2, True] for n, f in fleets.items()]
    said = [part.partition("base limit (") for part in talk.split("compiling ")[1:]]
    limits = {name.split()[0]: int(rest.partition(")")[0]) for name, _, rest in said}
    assert limits == {name: pool_bytes(fleet, FRACTION) for name, fleet in fleets.items()}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the tpu extra)")
def test_libtpu_knows_every_slice_with_these_hosts_and_devices():
    chips = [c for c in CATALOG.values() if c.slices]
    fleets = [Fleet.parse(f"{c.name}-{8 if c.slices.cores_per_chip_in_name == 2 else 4}") for c in chips]
    fleets += [Fleet.parse(name) for name in ("v5e-1", "v5p-512", "v7x-128", "v3-32")]
    seen, _ = in_a_process(TOPOLOGY, {f.name: topology_arguments(f) for f in fleets})
    assert [[n, d, p] for n, _, d, p in seen] == [[f.name, f.num_devices, f.num_hosts] for f in fleets]
    assert all(kind in fleet.chip.device_kinds for fleet, (_, kind, _, _) in zip(fleets, seen, strict=True))


def test_a_v100_is_refused_before_the_compiler_sees_it():
    with pytest.raises(InputError, match=r"no compute capability 7\.0, which V100-16GB has") as refused:
        target_config(Fleet.parse("8xV100"))
    assert "H100" in refused.value.hint
    assert "V100" not in refused.value.hint


@pytest.mark.parametrize(
    ("fleet", "why"),
    [("8xH800", "no target spec"), ("8xMI300X", "a rocm device"), ("8xCPU", "a cpu device")],
)
def test_a_chip_without_a_target_is_refused_with_those_that_have_one(fleet: str, why: str):
    with pytest.raises(InputError, match="cannot compile for") as refused:
        topology_arguments(Fleet.parse(fleet))
    assert why in refused.value.message
    assert all(name in refused.value.hint for name in TARGETS)


def test_a_tpu_has_no_gpu_target():
    with pytest.raises(InputError, match="it is a tpu device"):
        target_config(Fleet.parse("v5p-8"))


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1])
def test_a_fraction_that_is_no_share_is_refused(fraction: float):
    with pytest.raises(InputError, match="is no share"):
        target_config(Fleet.parse("8xH100"), fraction)


def test_the_pool_of_a_chip_of_unknown_memory_is_not_invented():
    with pytest.raises(InputError, match="does not know how much memory CPU has"):
        pool_bytes(Fleet.parse("8xCPU"))


def test_the_topology_is_partitions_hosts_devices():
    assert target_topology(Fleet.parse("512xH100")) == "1x64x8"


def test_tpu_slices_that_need_it_say_what_their_hosts_and_chips_are():
    assert topology_arguments(Fleet.parse("v5p-512")) == {"platform": "tpu", "topology_name": "v5p:4x8x8"}
    assert topology_arguments(Fleet.parse("v4-8"))["chip_config_name"] == "megacore"
    assert topology_arguments(Fleet.parse("v6e-1"))["chips_per_host_bounds"] == (1, 1, 1)
