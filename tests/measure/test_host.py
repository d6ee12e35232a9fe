import os

from meshwright.measure import _calibration as _host
from meshwright.measure import describe_host


def test_a_host_is_its_processor_cores_and_system():
    assert describe_host() == f"{_host.cpu_model()}, {_host.usable_cores()} cores, {os.uname().sysname}"
    assert 1 <= _host.usable_cores() <= (os.cpu_count() or 1)


def test_the_processor_has_the_name_the_kernel_gives_it(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9000 @ 1 Hz\n")
    monkeypatch.setattr(_host, "_CPUINFO", tmp_path / "cpuinfo")
    assert _host.cpu_model() == "Abacus 9000 @ 1 Hz"


def test_a_kernel_that_gives_no_name_leaves_the_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(_host, "_CPUINFO", tmp_path / "none")
    assert _host.cpu_model()
