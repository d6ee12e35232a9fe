import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from meshwright.errors import InputError
from meshwright.hardware import (
    CATALOG,
    Chip,
    Fleet,
    Target,
    find_chip,
    pool_bytes,
    rendered_target,
    target_config,
    topology_arguments,
    why_simulated,
)

NVIDIA = [c for c in CATALOG.values() if c.vendor == "NVIDIA"]
UNCOMPILED = {"V100-16GB", "V100-32GB", "B100"}
TARGETS = [c.name for c in NVIDIA if c.name not in UNCOMPILED]
FRACTION = 0.9

# Of chips that XLA has a spec for: clock in GHz, L2 cache in MiB and NVLink links as NVIDIA publishes them.
PUBLISHED = {
    "V100-16GB": (1.53, 6, 6),  # Volta white paper
    "A100-40GB": (1.41, 40, 12),  # A100 white paper
    "A100-80GB": (1.41, 40, 12),
    "A6000": (1.8, 6, 0),  # RTX A6000 in the GA102 white paper
    "H100": (1.98, 50, 18),  # H100 white paper
    "H100-PCIe": (1.755, 50, 0),  # H100 PCIe product brief
    "H200": (1.98, 60, 18),  # as the card itself reports; XLA's spec has 50
}
# Where XLA's spec says something else than the CUDA programming guide says of the compute capability.
ODD_SPECS = {
    ("B300", "accelerated_features"): (False, True),  # GB300, of the same compute capability, has them
    ("RTX-PRO-6000", "shared_memory_per_core_bytes"): (131072, 102400),  # XLA's holds the L1 cache as well
}
OF_A_MULTIPROCESSOR = (
    "accelerated_features",
    "fpus_per_core",
    "shared_memory_per_core_bytes",
    "shared_memory_per_block_optin_bytes",
    "threads_per_core_limit",
)

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

# The gradients of an MLP with attention-like products, for each target: the program and its temporary bytes.
PROGRAMS = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
def loss(x, w, v):
    hidden = jax.nn.gelu(x @ w)
    weights = jax.nn.softmax((hidden @ hidden.T).astype(jnp.float32), axis=-1).astype(x.dtype)
    return jnp.sum((weights @ hidden @ v).astype(jnp.float32) ** 2)
for name, arguments in json.load(sys.stdin).items():
    device = topologies.get_topology_desc(**arguments).devices[0]
    def array(*shape): return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))
    step = jax.jit(jax.grad(loss, argnums=(1, 2)))
    made = step.trace(array(1024, 512), array(512, 2048), array(2048, 512)).lower().compile()
    print(json.dumps([name, made.as_text(), made.memory_analysis().temp_size_in_bytes]))
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


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("T4", "A10", "RTX-4090", "H100", "RTX-5090"), id="few"),
        pytest.param(TARGETS, id="all", marks=pytest.mark.wide),
    ],
)
def test_xla_compiles_for_every_nvidia_chip_and_schedules_for_its_pool(names):
    fleets = {name: Fleet.parse(f"1x2x{name}") for name in names}
    given = {n: (topology_arguments(f, FRACTION), f.chip.memory_bytes // 2 * 2) for n, f in fleets.items()}
    compiled, talk = in_a_process(COMPILE, given)
    assert compiled == [[n, (*f.chip.device_kinds, n)[0], 2, True] for n, f in fleets.items()]
    said = [part.partition("base limit (") for part in talk.split("compiling ")[1:]]
    limits = {name.split()[0]: int(rest.partition(")")[0]) for name, _, rest in said}
    assert limits == {name: pool_bytes(fleet, FRACTION) for name, fleet in fleets.items()}


def render(chip: Chip) -> Target:
    assert chip.target is not None
    clock_ghz, l2_mib, links = PUBLISHED[chip.name]
    return rendered_target(
        compute_capability=".".join(map(str, chip.target.compute_capability)),
        clock_ghz=clock_ghz,
        l2_bytes=l2_mib * 2**20,
        nvlink_active_links=links,
        num_sms=chip.num_sms,
        memory_bytes_per_second=chip.memory_bytes_per_second,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_target_of_published_figures_is_xlas_own_spec_field_by_field(name: str):
    xlas, ours = find_chip(name).target, render(find_chip(name))
    assert (xlas.rendered, ours.rendered) == (False, True)
    assert ours.memory_bytes_per_second == pytest.approx(xlas.memory_bytes_per_second, rel=0.003)
    alike = {"rendered": False, "memory_bytes_per_second": xlas.memory_bytes_per_second}
    assert dataclasses.replace(ours, **alike) == xlas


def test_what_follows_from_the_compute_capability_is_as_in_all_of_xlas_specs():
    odd = {}
    for chip in NVIDIA:
        if chip.target is None or chip.target.rendered:
            continue
        ours = rendered_target(
            compute_capability=".".join(map(str, chip.target.compute_capability)),
            **dict.fromkeys(("clock_ghz", "l2_bytes", "nvlink_active_links", "num_sms"), 1),
            memory_bytes_per_second=1.0,
        )
        for field in OF_A_MULTIPROCESSOR:
            if getattr(chip.target, field) != getattr(ours, field):
                odd[chip.name, field] = (getattr(chip.target, field), getattr(ours, field))
    assert odd == ODD_SPECS


def test_the_compiled_program_is_the_same_for_xlas_spec_and_for_published_figures():
    given = {}
    for name in ("A100-80GB", "H100"):
        fleet = Fleet.parse(f"1x{name}")
        rendered = dataclasses.replace(fleet.chip, target=render(fleet.chip))
        given[f"{name} of XLA"] = topology_arguments(fleet)
        given[f"{name} rendered"] = topology_arguments(dataclasses.replace(fleet, chip=rendered))
        assert given[f"{name} of XLA"] != given[f"{name} rendered"]  # bandwidth, to 0.1 %
    (_, a100, a100_bytes), (_, *a100_rendered), (_, h100, h100_bytes), (_, *h100_rendered) = in_a_process(
        PROGRAMS, given
    )[0]
    assert a100_rendered == [a100, a100_bytes]
    assert h100_rendered == [h100, h100_bytes]
    assert a100 != h100  # the target does steer the compiler


@pytest.mark.parametrize("chip", [c for c in NVIDIA if c.target and c.target.rendered], ids=lambda c: c.name)
def test_the_clock_of_a_rendered_target_makes_the_published_fp32_peak(chip: Chip):
    target, peak = chip.target, chip.peak_flops_per_second.get("fp32")
    assert target is not None
    if peak is None or "fp32" in chip.uncertain_fields:
        assert "target" in chip.uncertain_fields  # no second source for the clock: then it says so
        return
    flops_per_clock = target.core_count * target.fpus_per_core * 2
    assert flops_per_clock * target.clock_ghz * 1e9 == pytest.approx(peak, rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the tpu extra)")
def test_libtpu_knows_every_slice_with_these_hosts_and_devices():
    chips = [c for c in CATALOG.values() if c.slices]
    fleets = [Fleet.parse(f"{c.name}-{8 if c.slices.cores_per_chip_in_name == 2 else 4}") for c in chips]
    fleets += [Fleet.parse(name) for name in ("v5e-1", "v5p-512", "v7x-128", "v3-32")]
    fleets += [Fleet.parse(name) for name in ("2xv5e-16", "3xv5p-16", "4xv5e-1", "2xv7x-16", "2xv4-16")]
    seen, _ = in_a_process(TOPOLOGY, {f.name: topology_arguments(f) for f in fleets})
    assert [[n, d, p] for n, _, d, p in seen] == [[f.name, f.num_devices, f.num_hosts] for f in fleets]
    assert all(kind in fleet.chip.device_kinds for fleet, (_, kind, _, _) in zip(fleets, seen, strict=True))


NUMBERS = TOPOLOGY.replace(
    "[name, devices[0].device_kind, len(devices), len({d.process_index for d in devices})]",
    "[[d.slice_index, d.id] for d in devices]",
)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the tpu extra)")
def test_libtpu_lists_several_slices_one_after_another_and_numbers_each_from_its_own_start():
    """`hlo` reads the devices of exchanges between slices by these numbers."""
    fleet = Fleet.parse("3xv5e-16")
    (listed,), _ = in_a_process(NUMBERS, {fleet.name: topology_arguments(fleet)})
    slices, ids = zip(*listed, strict=True)
    assert list(slices) == [number for number in range(3) for _ in range(16)]
    assert [divmod(number, 100_000)[0] - 1 for number in ids] == list(slices)
    assert sorted(number % 100_000 for number in ids[:16]) == list(range(16))


@pytest.mark.parametrize(
    ("fleet", "why"),
    [
        ("8xV100", "it has compute capability 7.0, and CUDA 13's compiler (ptxas) starts at 7.5"),
        ("8xB100", "neither its number of multiprocessors nor the size of its memory is published"),
        ("8xMI300X", "JAX's compiler for AMD needs an installed ROCm"),
    ],
)
def test_a_chip_that_nothing_compiles_for_is_refused_with_the_reason(fleet: str, why: str):
    with pytest.raises(InputError, match="cannot compile for") as refused:
        topology_arguments(Fleet.parse(fleet))
    assert why in refused.value.message
    assert why in why_simulated(Fleet.parse(fleet).chip)
    assert "--simulate" in refused.value.hint


def test_every_nvidia_chip_compiles_or_says_why_not():
    assert {c.name for c in NVIDIA if why_simulated(c)} == UNCOMPILED
    assert len(TARGETS) == 38
    amd = [c for c in CATALOG.values() if c.vendor == "AMD"]
    assert amd
    assert all("ROCm" in why_simulated(c) for c in amd)
    assert not any(why_simulated(c) for c in CATALOG.values() if c.platform in ("tpu", "cpu"))


@pytest.mark.parametrize("fleet", ["v5p-8", "8xCPU"])
def test_what_is_no_gpu_has_no_gpu_target(fleet: str):
    with pytest.raises(InputError, match=r"no target for the GPU compiler: it is a (tpu|cpu) device"):
        target_config(Fleet.parse(fleet))


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1])
def test_a_fraction_that_is_no_share_is_refused(fraction: float):
    with pytest.raises(InputError, match="is not above 0 and at most 1"):
        target_config(Fleet.parse("8xH100"), fraction)


def test_the_pool_is_a_share_of_the_chips_memory():
    memory_bytes = find_chip("H100").memory_bytes
    assert pool_bytes(Fleet.parse("8xH100"), 0.5) == memory_bytes // 2
    assert pool_bytes(Fleet.parse("8xH100")) == memory_bytes * 3 // 4  # JAX's share where nothing is set


def test_the_pool_of_a_chip_of_unknown_memory_is_not_invented():
    with pytest.raises(InputError, match="does not know how much memory CPU has"):
        pool_bytes(Fleet.parse("8xCPU"))


def test_the_topology_is_partitions_hosts_devices():
    assert topology_arguments(Fleet.parse("512xH100"))["topology"] == "1x64x8"


def test_tpu_slices_that_need_it_say_what_their_hosts_and_chips_are():
    assert topology_arguments(Fleet.parse("v5p-512")) == {"platform": "tpu", "topology_name": "v5p:4x8x8"}
    assert topology_arguments(Fleet.parse("v4-8"))["chip_config_name"] == "megacore"
    assert topology_arguments(Fleet.parse("v6e-1"))["chips_per_host_bounds"] == (1, 1, 1)
