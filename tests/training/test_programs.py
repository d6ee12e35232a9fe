import os
import subprocess
import sys
import textwrap

import jax
import pytest

from meshwright.compiler import Request, compile_program, requested_options
from meshwright.config import Layout, load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.loop import compile_programs


def weighed_fingerprint(config, fleet: str, layout: str, num_devices: int) -> str:
    request = Request(
        name=config.name,
        fleet=fleet,
        platform="cpu",
        source="target compiler",
        topology={},
        num_devices=num_devices,
        mesh_axes=Layout.parse(layout).resolve(num_devices).axes,
        options=requested_options("cpu", [("data", num_devices)]),
        config=config.model_dump(mode="json"),
    )
    return compile_program(request)[0].fingerprint


def test_the_program_that_runs_on_one_device_is_the_one_weighed(one_device):
    weighed = weighed_fingerprint(one_device.config, "1xCPU", "data=1", 1)
    assert one_device.measurement.fingerprint == weighed


@pytest.mark.wide
def test_the_program_that_runs_on_eight_devices_is_the_one_weighed(eight_devices):
    weighed = weighed_fingerprint(eight_devices.config, "8xCPU", "data=2,fsdp=2,tensor=2", 8)
    assert eight_devices.measurement.fingerprint == weighed


@pytest.mark.parametrize("num_devices", [1, 2])
def test_xla_counts_the_flops_of_a_program_without_loops_for_all_devices(num_devices: int):
    config = load_config("cruncher", ["model.width=256", "batch.sequences=512"])
    programs = compile_programs(config, mesh_of((("data", num_devices),), jax.devices()[:num_devices]), "cpu")
    # Two layers of 256 x 256 and one to a number: 2BP forward, 4BP backward less the first input's gradient.
    parameters = 2 * 256 * 256 + 256
    matmuls = 6 * 512 * parameters - 2 * 512 * 256 * 256
    assert programs.no_xla_flops == ""
    assert programs.xla_flops == pytest.approx(matmuls, rel=0.02)  # XLA adds elementwise arithmetic


def test_a_program_with_loops_has_no_count_and_says_why(one_device):
    assert one_device.measurement.xla_flops is None
    assert "loop" in one_device.measurement.not_measured["xla_flops"]


def test_a_file_of_autotuning_results_is_written_or_read_as_the_whole_run_has_decided(tmp_path):
    file = tmp_path / "results.txtpb"
    config = load_config("linear", [f"autotune_results={file}"])
    mesh = mesh_of((("data", 1),), jax.devices()[:1])
    file.write_text("no results")  # as by the first process; a CPU takes the option, and times nothing
    assert compile_programs(config, mesh, "cpu", times_kernels=True).results == file
    assert compile_programs(config, mesh, "cpu").results is None


@pytest.mark.gpu
def test_a_run_on_a_gpu_writes_its_kernels_and_the_next_weighing_is_of_its_program(tmp_path):
    file = tmp_path / "results.txtpb"
    script = textwrap.dedent(f"""
        import meshwright as mw
        kernels = {{"autotune_results": {str(file)!r}}}
        ran = mw.train("cruncher", on="local", overrides=kernels, steps=2, folder={str(tmp_path / "run")!r})
        weighed = mw.weigh("cruncher", on="local", overrides=kernels)
        assert weighed.compiled.fingerprint == ran.measurement.fingerprint
    """)
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
