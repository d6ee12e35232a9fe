import dataclasses
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.api import _train
from meshwright.errors import MeshwrightError
from meshwright.hardware import Calibration, Fleet
from meshwright.measure import (
    Reconciliation,
    Row,
    calibration_of_chip,
    calibration_of_this_machine,
    cautions,
    describe_host,
    doubt_calibration,
    probe,
)
from meshwright.measure import _kept_calibration as _calibration

MADE = Calibration(
    matmul_flops_per_second={"fp32": 1e11},
    memory_bytes_per_second=1e10,
    launch_seconds=1e-6,
    date=f"{datetime.now(UTC):%Y-%m-%d}",
    source="made up by a test",
)


@pytest.fixture
def probes(monkeypatch, tmp_path) -> list[Path]:
    """Where the cache is empty and the probe answers at once; one entry for each time it was asked."""
    asked: list[Path] = []

    def answer(path: Path, **_: bool) -> Calibration:
        asked.append(path)
        return MADE

    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_calibration, "_run_probe", answer)
    return asked


def test_a_machine_is_measured_once(probes, tmp_path):
    assert calibration_of_this_machine() == calibration_of_this_machine() == MADE
    assert len(probes) == 1
    assert [name.partition("-")[0] for name in os.listdir(tmp_path / "cache")].count("calibration") == 1
    assert len(os.listdir(tmp_path / "cache")) == 2  # nothing is left beside it but its lock


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", MADE.to_json().replace("1e-06", "-1").encode()])
def test_a_corrupt_file_is_measured_again(probes, tmp_path, content: bytes):
    calibration_of_this_machine()
    (kept,) = (tmp_path / "cache").glob("calibration-*")
    kept.write_bytes(content)
    assert calibration_of_this_machine() == MADE
    assert len(probes) == 2


def test_another_machine_or_compiler_is_measured_anew(probes, monkeypatch):
    calibration_of_this_machine()
    monkeypatch.setattr(_calibration, "describe_host", lambda: "an abacus, 10 beads")
    calibration_of_this_machine()
    monkeypatch.setattr(_calibration, "installed_versions", lambda: {"jaxlib": "0.99"})
    calibration_of_this_machine()
    assert len(probes) == 3


@pytest.mark.parametrize("measure", [calibration_of_this_machine, probe])
def test_a_probe_that_fails_shows_its_last_lines(monkeypatch, tmp_path, measure):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_calibration, "_probe", lambda: "meshwright.measure._no_such_probe")
    with pytest.raises(MeshwrightError, match=r"No module named .*_no_such_probe") as error:
        measure()
    assert "-m meshwright.measure._no_such_probe" in error.value.hint
    assert list(tmp_path.glob("[!.]*")) == []


def test_a_probe_that_never_ends_is_stopped(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_calibration, "TIME_LIMIT_SECONDS", 0.001)
    with pytest.raises(MeshwrightError, match=r"not done after 0\.001 s"):
        calibration_of_this_machine()


@pytest.mark.wide
def test_asking_for_a_calibration_imports_no_jax(tmp_path):
    code = (
        "import sys; from meshwright.measure import calibration_of_this_machine as c; c(); "
        "sys.exit('jax' in sys.modules)"
    )
    environment = {**os.environ, "MESHWRIGHT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (kept,) = tmp_path.glob("calibration-*")
    measured = Calibration.from_json(kept.read_text())  # by the real probe: a processor made in this century
    assert measured.matmul_flops_per_second.keys() == {"fp32", "bf16"}
    assert 1e9 < measured.matmul_flops_per_second["fp32"] < 1e15
    assert 1e8 < measured.memory_bytes_per_second < 1e13
    assert 1e-9 <= measured.launch_seconds < 1e-3
    assert measured.spread.keys() == {"large product in fp32", "large product in bf16", "memory", "launch"}
    assert all(share >= 0 for share in measured.spread.values())
    assert 0 <= measured.load <= 1


def kept_of(tmp_path) -> Path:
    return next(path for path in (tmp_path / "cache").iterdir() if path.suffix == ".json")


def keep(tmp_path, **changes) -> None:
    """Put what was measured, with changes, in the place of what is kept."""
    calibration_of_this_machine()
    kept_of(tmp_path).write_text(dataclasses.replace(MADE, **changes).to_json())


def test_rates_that_a_run_disagreed_with_are_measured_again_and_say_why(probes, tmp_path):
    keep(tmp_path, memory_bytes_per_second=1e9)
    doubt_calibration("CPU", "a run of line took 2 s a step")
    assert cautions(MADE) == ("a run of line took 2 s a step: `meshwright probe` measures again",)
    found = calibration_of_this_machine()
    assert found == dataclasses.replace(MADE, measured_again="a run of line took 2 s a step")
    assert cautions(found) == ()
    assert len(probes) == 2
    assert calibration_of_this_machine() == found
    assert len(probes) == 2


def test_a_second_disagreement_is_the_predictions_and_measures_nothing(probes, tmp_path):
    keep(tmp_path, measured_again="a run", date=f"{datetime.now(UTC):%Y-%m-%d}")
    doubt_calibration("CPU", "another run")
    calibration_of_this_machine()
    assert len(probes) == 1
    keep(tmp_path, measured_again="a run", date="2020-01-01")
    doubt_calibration("CPU", "another run")
    assert calibration_of_this_machine().measured_again == "another run"


@pytest.mark.parametrize(("measured", "doubted"), [(1.0, []), (3.0, ["CPU"])])
def test_a_run_outside_the_interval_puts_the_rates_in_doubt(monkeypatch, measured, doubted):
    chips = []
    monkeypatch.setattr(_train, "doubt_calibration", lambda chip, reason: chips.append(chip))
    row = Row(
        quantity="step seconds", unit="seconds", predicted=1.0, measured=measured, how="", low=0.6, high=1.4
    )
    reconciliation = Reconciliation(same_program=True, rows=(row,), not_compared={})
    weighing = SimpleNamespace(name="line", fleet=Fleet.parse("2xCPU"))
    _train._doubt_rates(weighing, reconciliation)
    assert chips == doubted


def test_doubting_what_was_never_measured_does_nothing(probes, tmp_path):
    doubt_calibration("CPU", "a run")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("busy_now", "times"), [(0.7, 1), (0.1, 2)])
def test_rates_of_a_busy_machine_are_measured_again_once_it_is_quiet(
    probes, tmp_path, monkeypatch, busy_now, times
):
    keep(tmp_path, load=0.8)
    monkeypatch.setattr(_calibration, "busy_share", lambda: busy_now)
    calibration_of_this_machine()
    assert len(probes) == times


def test_old_rates_another_jaxlib_and_a_busy_machine_are_said(probes):
    now = datetime.now(UTC)
    old = dataclasses.replace(MADE, date=f"{now - timedelta(days=31):%Y-%m-%d}", jaxlib="0.1", load=0.5)
    days, version, load = cautions(old)
    assert "measured 31 days ago" in days
    assert "jaxlib 0.1, installed is" in version
    assert "others kept 50 % of the cores busy" in load
    fresh = dataclasses.replace(MADE, date=f"{now:%Y-%m-%d}", load=0.1)
    assert cautions(fresh) == ()


@pytest.fixture
def detailed(monkeypatch, tmp_path):
    """A detailed probe that answers at once, for the chip it is told."""
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))

    def answers(chip: str):
        monkeypatch.setattr(_calibration, "_run_probe", lambda *_, **__: dataclasses.replace(MADE, chip=chip))

    return answers


def test_a_probe_of_the_cpu_takes_the_place_of_what_was_kept(detailed):
    detailed("CPU")
    assert probe() == calibration_of_this_machine() == MADE


def test_a_probe_of_an_accelerator_is_kept_by_its_chip(detailed):
    detailed("H200")
    assert calibration_of_chip("H200") is None
    assert probe().chip == "H200"
    assert calibration_of_chip("H200") == dataclasses.replace(MADE, chip="H200")
    assert calibration_of_chip("H100") is None


def test_a_host_is_its_processor_cores_and_system():
    assert (
        describe_host()
        == f"{_calibration.cpu_model()}, {_calibration.usable_cores()} cores, {os.uname().sysname}"
    )
    assert 1 <= _calibration.usable_cores() <= (os.cpu_count() or 1)


def test_the_processor_has_the_name_the_kernel_gives_it(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9000 @ 1 Hz\n")
    monkeypatch.setattr(_calibration, "CPUINFO", tmp_path / "cpuinfo")
    assert _calibration.cpu_model() == "Abacus 9000 @ 1 Hz"


def test_a_kernel_that_gives_no_name_leaves_the_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(_calibration, "CPUINFO", tmp_path / "none")
    assert _calibration.cpu_model()


def test_of_ten_first_callers_one_measures_and_the_others_wait_for_its_rates(probes, monkeypatch):
    together, measuring = threading.Barrier(10), threading.Semaphore(0)

    def answer(path: Path, **_: bool) -> Calibration:
        probes.append(path)
        measuring.acquire(timeout=0.2)  # long enough for the others to ask
        return dataclasses.replace(MADE, launch_seconds=1e-6 * len(probes))

    def ask() -> Calibration:
        together.wait()
        return calibration_of_this_machine()

    monkeypatch.setattr(_calibration, "_run_probe", answer)
    with ThreadPoolExecutor(10) as pool:
        got = [each.result() for each in [pool.submit(ask) for _ in range(10)]]
    assert len(probes) == 1
    assert got == [MADE] * 10


def test_of_several_that_doubt_the_rates_one_measures_again(probes, monkeypatch):
    calibration_of_this_machine()
    doubt_calibration("CPU", "a run took longer")
    together = threading.Barrier(4)

    def ask() -> Calibration:
        together.wait()
        return calibration_of_this_machine()

    with ThreadPoolExecutor(4) as pool:
        got = [each.result() for each in [pool.submit(ask) for _ in range(4)]]
    assert len(probes) == 2
    assert {each.measured_again for each in got} == {"a run took longer"}


def test_rates_that_are_replaced_while_they_are_read_are_not_used(probes, monkeypatch):
    calibration_of_this_machine()
    doubt_calibration("CPU", "a run took longer")
    read = _calibration._kept

    def read_slowly(path: Path) -> Calibration | None:
        kept = read(path)
        monkeypatch.setattr(_calibration, "_kept", read)
        calibration_of_this_machine()  # as another process would
        return kept

    monkeypatch.setattr(_calibration, "_kept", read_slowly)
    assert calibration_of_this_machine().measured_again == "a run took longer"
    assert len(probes) == 2
