from __future__ import annotations

import importlib.metadata
import json

import pytest

from meshwright import measure, plugins
from meshwright.contrib.doctor import _doctor_commands as _doctor
from meshwright.extras import how_to_install
from meshwright.hardware import Calibration

FOR_CARDS = 'sys_platform == "linux" and extra == "with-cuda"'


@pytest.fixture
def without(monkeypatch):
    """Makes packages look as if they were not installed."""

    def hide(*packages: str) -> None:
        def version(package: str) -> str:
            if package in packages:
                raise importlib.metadata.PackageNotFoundError(package)
            return "1.0"

        monkeypatch.setattr(importlib.metadata, "version", version)

    return hide


@pytest.fixture
def answers(monkeypatch):
    """Stands in for the processes that doctor starts: what each fleet's try comes to."""

    def stand_in(failing: str = "", devices: str = '[["cpu", "cpu"], ["cpu", "cpu"]]') -> None:
        def run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
            if failing and failing in arguments:
                return 1, "", "ptxas: no such file"
            return (0, f"talk\n{devices}\n", "") if devices else (1, "", "no backend")

        monkeypatch.setattr(_doctor, "_run", run)

    return stand_in


def test_this_machine_is_what_it_is(meshwright):
    answer = meshwright("doctor", "--json").json
    targets = {target["platform"]: target for target in answer["targets"]}
    assert targets["cpu"]["compiles"] is True
    for target in targets.values():  # what is installed must compile, what is missing must be named
        missing = {name for name, version in target["packages"].items() if version is None}
        assert target["compiles"] is (None if missing else True), target["words"]
        assert bool(target["install"]) == bool(missing)
    assert answer["versions"]["jax"] == importlib.metadata.version("jax")
    assert answer["devices"][0]["platform"] == "cpu"
    assert answer["machine"]["cores"] >= 1
    assert answer["machine"]["memory_bytes"] > 2**30


def test_the_chips_that_only_simulation_weighs_are_named_with_the_reason(meshwright, answers):
    answers()
    text = " ".join(meshwright("doctor").output.split())
    assert "V100-16GB, V100-32GB it has compute capability 7.0" in text
    assert "RTX-4090" not in text
    reasons = meshwright("doctor", "--json").json["only_simulated"]
    assert ["B100"] in reasons.values()
    assert any("ROCm" in why and "MI355X" in chips for why, chips in reasons.items())


def test_a_missing_package_is_answered_with_its_extra(meshwright, without, answers):
    without("jax-cuda13-plugin", "libtpu")
    answers()
    done = meshwright("doctor")
    assert done.status == 0
    assert f"cuda: {how_to_install('nvidia')}" in done.output
    assert f"tpu: {how_to_install('tpu')}" in done.output
    assert "jax-cuda13-plugin missing (JAX's plugin)" in done.output
    assert "2 x cpu (cpu)" in done.output


LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvcc", "nvidia-nvvm")
ON_A_CARD = '[["gpu", "NVIDIA H100 80GB HBM3"]]'


@pytest.mark.parametrize("devices", [(), ("/dev/null",)], ids=["no GPU", "a GPU"])
def test_libraries_of_nvidias_are_called_for_only_to_run_on_a_card(
    devices, meshwright, without, answers, monkeypatch
):
    monkeypatch.setattr(plugins, "NVIDIA_DEVICES", devices)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [f"{n}>=1; {FOR_CARDS}" for n in LIBRARIES])
    without("nvidia-cudnn-cu13", "nvidia-cublas")
    answers()
    done = meshwright("doctor")
    assert done.status == 0
    assert "cuda (1xH100)             compiles" in done.output
    assert "2 of 4 libraries are not installed; weighing needs none" in done.output
    assert ("nvidia-cublas" in done.output) is bool(devices)
    assert (f"NVIDIA GPU: {how_to_install('cuda')}" in done.output) is bool(devices)
    assert "missing" not in done.output.replace("libtpu missing", "")
    answers(devices=ON_A_CARD)  # a toolkit of the machine may have what packages lack
    used = meshwright("doctor")
    assert "in use" in used.output
    assert how_to_install("cuda") not in used.output


def test_the_libraries_are_those_that_jax_lists_for_a_card(meshwright, answers):
    answers()
    state = meshwright("doctor", "--json").json["nvidia_gpu"]
    assert state.keys() == {"present", "used", "packages", "install"}
    if state["packages"]:  # JAX's plugin is installed
        assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cufft"} <= state["packages"].keys()


def test_a_compiler_that_fails_is_shown_with_its_words(meshwright, without, answers):
    without()
    answers(failing="1xH100")
    done = meshwright("doctor")
    assert done.status == 1
    assert "cuda failed on 1xH100:\nptxas: no such file" in done.output


def test_no_device_at_all_is_a_failure_in_words(meshwright, without, answers):
    without()
    answers(devices="")
    done = meshwright("doctor")
    assert done.status == 1
    assert "JAX finds no device: no backend" in done.output


def test_a_try_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(_doctor, "TIME_LIMIT_SECONDS", 0.2)
    assert _doctor._run(["-c", "import time; time.sleep(60)"], {}) == (-1, "", "not done after 0.2 s")


def test_the_cache_is_measured_in_all_its_folders(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"123")
    assert _doctor._folder_bytes(tmp_path) == 8
    assert _doctor._folder_bytes(tmp_path / "absent") == 0


def test_a_file_of_the_cache_that_may_not_be_seen_counts_nothing(meshwright, answers, monkeypatch, tmp_path):
    answers()
    (tmp_path / "y").write_bytes(b"123")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    assert meshwright("doctor", "--json").json["cache"]["num_bytes"] == 3


CALIBRATION = Calibration(
    matmul_flops_per_second={"fp32": 1e11},
    memory_bytes_per_second=2e10,
    launch_seconds=3e-6,
    date="2026-11-21",
    source="a test",
)


def test_what_was_measured_is_shown_or_given_as_json(meshwright, monkeypatch):
    monkeypatch.setattr(measure, "probe", lambda: CALIBRATION)
    assert "large product in fp32" in meshwright("probe").output
    answer = meshwright("probe", "--json")
    assert Calibration.from_json(json.dumps(answer.json)) == CALIBRATION
