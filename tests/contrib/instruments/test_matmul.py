from pathlib import Path

import pytest

import meshwright as mw
from meshwright.contrib.instruments import MatmulMFU, _timing
from meshwright.hardware import find_chip
from meshwright.measure import Percentiles


def test_a_product_of_n_takes_two_n_cubed_and_a_cpus_promise_is_an_estimate():
    (found,) = mw.matmul_mfu(64, formats=("fp32",))
    assert (found.format, found.size, found.num_flops) == ("fp32", 64, 2 * 64**3)
    assert found.achieved_flops_per_second == pytest.approx(found.num_flops / found.seconds.median)
    assert found.promise_is_estimate
    if found.promised_flops_per_second is not None:
        assert found.promised_source.startswith("estimate: ")
        assert found.mfu == pytest.approx(found.achieved_flops_per_second / found.promised_flops_per_second)


def test_a_format_whose_units_are_not_known_has_no_promise():
    (found,) = mw.matmul_mfu(32, formats=("bf16",))
    assert (found.promised_flops_per_second, found.mfu) == (None, None)
    assert found.promised_source == "whether this CPU has units for bf16 is not known here"


def test_float64_is_timed_in_float64():
    (found,) = mw.matmul_mfu(32, formats=("fp64",))
    assert found.format == "fp64"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(formats=("fp31",)), "no product is timed in format 'fp31'"),
        (dict(size=0), "a product of size 0"),
        (dict(formats="fp32"), "formats = 'fp32' is one name"),
        (dict(device="cpu"), "'cpu' is not a device"),
    ],
)
def test_a_wrong_format_or_size_is_refused(arguments, words):
    with pytest.raises(mw.InputError, match=words):
        mw.matmul_mfu(**arguments)


CPUINFO = "flags\t\t: fpu avx2 fma\ncpu MHz\t\t: 2000.000\n\nflags\t\t: fpu avx2 fma\ncpu MHz\t\t: 1900.000\n"


def test_the_estimate_is_cores_times_clock_times_flops_a_cycle(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    monkeypatch.setattr(_timing, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(_timing, "usable_cores", lambda: 4)
    # avx2: two units of eight float32 lanes, a multiply-add each: 32 a cycle
    assert _timing._cpu_promise("fp32")[0] == 4 * 2.0e9 * 32
    assert _timing._cpu_promise("fp64")[0] == 4 * 2.0e9 * 16


@pytest.mark.parametrize(("siblings", "usable", "cores"), [(2, 4, 4), (4, 4, 2), (4, 1, 1)])
def test_two_threads_of_one_core_share_its_units(monkeypatch, tmp_path, siblings, usable, cores):
    (tmp_path / "cpuinfo").write_text(f"{CPUINFO}siblings\t: {siblings}\ncpu cores\t: 2\n")
    monkeypatch.setattr(_timing, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(_timing, "usable_cores", lambda: usable)
    assert _timing._cpu_promise("fp32")[0] == cores * 2.0e9 * 32


@pytest.mark.parametrize(("estimated", "mfu_is_told"), [(True, True), (False, False)])
def test_more_than_a_data_sheet_promises_is_no_utilisation(monkeypatch, estimated, mfu_is_told):
    monkeypatch.setattr(_timing, "_promise", lambda device, name: (1.0, "a sheet", estimated))
    (found,) = mw.matmul_mfu(16, formats=("fp32",))
    assert found.achieved_flops_per_second > 1
    assert (found.mfu is not None) == mfu_is_told
    assert ("so the clock or the catalog is wrong" in str(found)) != mfu_is_told


@pytest.mark.parametrize("text", [None, "nothing of use\n"])
def test_a_system_that_tells_nothing_has_no_estimate(monkeypatch, tmp_path, text):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(_timing, "CPUINFO", path)
    assert _timing._cpu_promise("fp32")[:2] == (
        None,
        "this system does not report the processor's clock and instruction sets",
    )


class Gpu:
    platform, id, device_kind = "gpu", 0, "NVIDIA H200"


class Unheard(Gpu):
    device_kind = "NVIDIA H300"


def test_a_catalogued_gpu_promises_its_dense_peak():
    peak = find_chip("H200").peak_flops_per_second["bf16"]
    assert _timing._promise(Gpu(), "bf16") == (peak, "catalog: H200, dense", False)


def test_what_the_catalog_does_not_know_has_no_promise():
    promised, reason, estimated = _timing._promise(Unheard(), "bf16")
    assert (promised, estimated) == (None, False)
    assert "NVIDIA H300" in reason
    assert _timing._promise(Gpu(), "fp4-odd")[1] == "the catalog has no dense peak of H200 in fp4-odd"


def made(**changes):
    fields = dict(
        device="cpu:0 (some CPU)",
        format="fp32",
        size=100,
        num_flops=2 * 10**6,
        seconds=Percentiles(median=0.001, low=0.001, high=0.001, num_steps=10),
        achieved_flops_per_second=2e9,
        promised_flops_per_second=4e9,
        promised_source="estimate: 1 cores",
        promise_is_estimate=True,
        mfu=0.5,
    )
    return MatmulMFU(**{**fields, **changes})


def test_it_reads_as_a_sentence():
    assert str(made()) == (
        "fp32, 100 x 100 on cpu:0 (some CPU): 2.00 GFLOP/s in 1.00 ms\n"
        "  50.0% of 4.00 GFLOP/s, estimate: 1 cores"
    )
    nothing = made(promised_flops_per_second=None, mfu=None, promised_source="why")
    assert str(nothing).endswith("2.00 GFLOP/s in 1.00 ms\n  promised: not known, why")


def test_eight_threads_multiply_at_once(at_once):
    assert len(at_once(lambda: mw.matmul_mfu(16, formats=("fp32",)))) == 8


def test_the_processors_own_file_is_read_where_there_is_one():
    assert Path("/proc/cpuinfo") == _timing.CPUINFO
