"""The reports that a compiler leaves before it makes machine code say what its executable would say.

They are those of the installed compilers, for eight simulated devices and for absent GPUs.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.compiler import TEXTS, fingerprint_of, read_text
from meshwright.errors import CompileError
from meshwright.hardware import Fleet, topology_arguments
from meshwright.sharding import mesh_of
from meshwright.worker import KernelsAlone, are_written, bytes_in, may_fail_late, program_in, texts_in

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.12 announces the end of its Triton kernels
    from jax.experimental.pallas import triton

DUMPS = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True, "xla_dump_hlo_pass_re": "NONE"}
SIZES = {"argument": "argument_size", "output": "output_size", "alias": "alias_size", "temp": "temp_size"}


def step(weights, batch):
    """Lower the loss of a stack of layers by one step, with messages over both axes."""

    def loss(weights):
        hidden, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)
        return (hidden**2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return weights - gradients, value


def compiled(fleet: Fleet, dump: Path) -> jax.stages.Compiled:
    """Compile a step whole, for simulated or absent devices, with its reports in a folder."""
    platform = fleet.chip.platform
    devices = jax.devices()
    if platform != "cpu":
        devices = topologies.get_topology_desc(**topology_arguments(fleet)).devices
    mesh = mesh_of((("data", 4), ("tensor", 2)), list(devices))

    def placed(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    args = placed((3, 64, 64), None, None, "tensor"), placed((32, 64), "data")
    lowered = jax.jit(step, donate_argnums=0).trace(*args).lower(lowering_platforms=(platform,))
    return lowered.compile(compiler_options={**DUMPS, "xla_dump_to": str(dump)})


@pytest.mark.program  # an executable that was kept before would leave no reports
@pytest.mark.parametrize("fleet", ["8xCPU", "8xH100"])
def test_the_reports_say_what_the_executable_says_of_itself(fleet, tmp_path):
    executable = compiled(Fleet.parse(fleet), tmp_path)
    assert are_written(tmp_path)
    assert fingerprint_of(program_in(tmp_path)) == fingerprint_of(executable.as_text())
    found, analysis = bytes_in(texts_in(tmp_path)[TEXTS[1]]), executable.memory_analysis()
    for where in ("", "host_"):
        for name, attribute in SIZES.items():
            assert found[where + name] == getattr(analysis, f"{where}{attribute}_in_bytes"), where + name
    assert found["temp"] > 0 < found["alias"]


def test_reports_are_complete_once_no_file_is_being_written(tmp_path: Path):
    for suffix in (".txt", "-buffer-assignment.txt", "-live-range.txt"):
        (tmp_path / f"module_0001.jit_step.sm_9.0a_gpu_after_optimizations{suffix}").write_text("whole")
    assert not are_written(tmp_path)
    last = tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.hlo.pb"
    with last.open("wb") as file:
        file.write(b"half")
        file.flush()
        assert not are_written(tmp_path)
    assert are_written(tmp_path)
    assert not are_written(tmp_path / "absent")


def test_a_report_that_was_cut_off_is_not_taken_for_a_program(tmp_path):
    (tmp_path / "module_0001.jit_step.cpu_after_optimizations.hlo.pb").write_bytes(b"\x0a\x05step")
    with pytest.raises(AssertionError, match="a field of kind 2 with 5 bytes"):
        program_in(tmp_path)
    (tmp_path / "module_0001.jit_step.cpu_after_optimizations.hlo.pb").write_bytes(b"\x0a\x04step")
    with pytest.raises(AssertionError, match="ends before the buffer assignment"):
        program_in(tmp_path)


def test_a_step_of_ours_is_not_waited_for(weighed):
    for fleet in ("8xH100", "1xCPU"):
        found = weighed("bytes-nano" if fleet == "8xH100" else "linear", fleet, "data=-1")
        assert not may_fail_late(read_text(found.folder, TEXTS[0]), found.compiled.platform)


@pytest.mark.parametrize(
    "line",
    [
        '%a = f32[2]{0} custom-call(%b), custom_call_target="somebodys_kernel", api_version=API_VERSION',
        '%a = f32[2]{0} custom-call(%b), custom_call_target="__gpu$xla.gpu.triton"',
        '%a = f32[2]{0} fusion(%b), kind=kCustom, backend_config={"kind":"__triton_gemm"}',
        "%a = f4e2m1fn[2]{0} convert(%b)",
        "%a = (f32[2]{0}, s4[2]{0}) tuple(%b, %c)",
        "%a = ((f32[2]{0}), f32[2]{0}) fft-start(%b), fft_type=FFT",
        "ROOT %a = f32[2]{0} dot(%b, %c)",
    ],
)
def test_what_machine_code_may_not_be_made_of_is_waited_for(line):
    assert may_fail_late(f"HloModule step\n\nENTRY %main {{\n  {line}\n}}\n", "cuda")


def test_products_on_a_cpu_are_not_waited_for():
    assert not may_fail_late("ENTRY %main {\n  ROOT %a = f32[2]{0} dot(%b, %c)\n}\n", "cpu")


def test_a_kernel_that_compiles_alone_is_not_waited_for():
    line = '  ROOT %a = f32[2]{0} custom-call(%b), custom_call_target="__gpu$xla.gpu.triton"'
    assert not may_fail_late(line, "cuda", (KernelsAlone.target,))
    other = line.replace("ROOT %a", "%c").replace(KernelsAlone.target, "somebodys_kernel")
    assert may_fail_late(f"{other}\n{line}", "cuda", (KernelsAlone.target,))


def product_of(size):
    """A kernel that multiplies two matrices in one block."""
    matrix = jax.ShapeDtypeStruct((size, size), jnp.float32)

    def product(x_ref, y_ref, z_ref):
        z_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    options = triton.CompilerParams(num_warps=4, num_stages=2)
    return pl.pallas_call(product, out_shape=matrix, compiler_params=options, name="product"), matrix


@pytest.mark.program  # an executable for a device that is not there cannot be loaded
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("sizes", "compiles"), [((), False), ((32, 64), True), ((32, 256), False)])
def test_the_kernels_of_a_program_compile_alone_or_it_is_waited_for(sizes, compiles, tmp_path):
    """The last needs more shared memory than there is."""
    device = topologies.get_topology_desc(**topology_arguments(Fleet.parse("1xH100"))).devices[0]

    def looped(kernel, matrix):
        body = lambda x, _: (jnp.tanh(kernel(x, x)), None)  # noqa: E731
        return jax.lax.scan(body, jnp.ones(matrix.shape, matrix.dtype), length=3)[0].sum()

    program = jax.make_jaxpr(lambda: [looped(*product_of(size)) for size in sizes])().jaxpr
    alone = KernelsAlone(program, device, {}, tmp_path / "toolkit")
    assert alone.compiled() == compiles


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_kernel_that_takes_too_much_shared_memory_is_refused(forked_workers):
    """Triton finds out when it makes machine code, after the reports on the program."""
    kernel, matrix = product_of(256)
    with pytest.raises(CompileError, match="Shared memory size limit exceeded: requested 262144"):
        mw.weigh(mw.jax_step(kernel, matrix, matrix), on="1xH100")
