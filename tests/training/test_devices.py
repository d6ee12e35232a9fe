from types import SimpleNamespace

import jax
import pytest

from meshwright import plugins
from meshwright.config import Layout
from meshwright.errors import InputError, MeshwrightError
from meshwright.extras import how_to_install
from meshwright.hardware import Fleet
from meshwright.trainer.launch import SingleProcess
from meshwright.trainer.loop import _devices, devices_of, local_fleet
from meshwright.trainer.loop._devices import fleet_of_hosts, share_of

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def attached(monkeypatch, *kinds: str) -> None:
    devices = [SimpleNamespace(device_kind=kind) for kind in kinds]
    monkeypatch.setattr(_devices.jax, "devices", lambda: devices)


def test_without_an_accelerator_the_local_fleet_is_one_cpu():
    assert local_fleet().name == "1xCPU"  # in a process of its own: not the eight of this one


def test_attached_gpus_are_one_host_of_the_catalog(monkeypatch):
    listed = [["gpu", H100], ["gpu", H100]]
    monkeypatch.setattr(_devices, "_LIST_DEVICES", f"import json; print(json.dumps({listed!r}))")
    assert local_fleet().name == "2xH100"


def test_a_process_that_holds_the_gpus_lists_its_own(monkeypatch):
    """Another process might find no memory left on them to start with."""
    monkeypatch.setattr(_devices, "_LIST_DEVICES", "raise SystemExit('no memory left')")
    monkeypatch.setattr(_devices, "_has_devices", lambda: True)
    gpus = [SimpleNamespace(platform="gpu", device_kind=H100)] * 2
    monkeypatch.setattr(_devices.jax, "devices", lambda: gpus)
    assert local_fleet().name == "2xH100"


def test_a_failure_to_list_devices_has_its_last_words(monkeypatch):
    monkeypatch.setattr(_devices, "_LIST_DEVICES", "raise SystemExit('the driver is too old')")
    with pytest.raises(MeshwrightError, match="the driver is too old"):
        local_fleet()


def test_a_cpu_fleet_is_the_first_of_the_simulated_devices():
    assert devices_of(Fleet.parse("2xCPU"), Layout.parse("data=2")) == jax.devices("cpu")[:2]


class Several(SingleProcess):
    count = 3


def test_processes_that_cannot_share_the_simulated_devices_are_refused(monkeypatch):
    monkeypatch.setattr(_devices, "processes_of_this_run", Several)
    with pytest.raises(InputError, match="3 processes cannot share the 8 devices of 8xCPU evenly") as error:
        devices_of(Fleet.parse("8xCPU"), Layout.parse("data=8"))
    assert "start 2 or 4 processes, or simulate a multiple of 3 devices" in error.value.hint


def test_on_cpus_each_process_brings_one_device(monkeypatch):
    monkeypatch.setattr(_devices, "processes_of_this_run", Several)
    assert local_fleet().name == "3xCPU"


def test_all_devices_of_several_processes_belong_to_the_fleet(monkeypatch):
    monkeypatch.setattr(_devices, "processes_of_this_run", Several)
    devices = [SimpleNamespace(device_kind=H100)] * 4
    with pytest.raises(InputError, match="3 processes have 4 devices, and 2xH100 has 2") as error:
        _devices._attached(Fleet.parse("2xH100"), devices)
    assert "--on local" in error.value.hint


def test_more_simulated_devices_than_were_made_need_a_new_process():
    jax.devices()
    with pytest.raises(MeshwrightError, match=r"16xCPU needs 16 .* jax has made 8") as error:
        devices_of(Fleet.parse("16xCPU"), Layout.parse("data=16"))
    assert "jax_num_cpu_devices to 16" in error.value.hint


def test_a_fleet_that_is_not_attached_is_named_beside_what_is(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    monkeypatch.setattr(_devices, "_has_devices", lambda: False)
    attached(monkeypatch, "cpu", "cpu")
    with pytest.raises(InputError, match=r"8xH100 is not attached: this machine has 2 x cpu") as error:
        devices_of(Fleet.parse("8xH100"), Layout.parse("data=8"))
    assert "--on local" in error.value.hint


@pytest.mark.parametrize("chosen", [{}, {"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}], ids=str)
def test_a_gpu_that_jax_cannot_use_is_no_cpu_unless_somebody_chose_so(chosen, monkeypatch):
    monkeypatch.setattr(plugins, "NVIDIA_DEVICES", ("/dev/null",))
    monkeypatch.setattr(_devices, "_LIST_DEVICES", 'print(\'[["cpu", "cpu"]]\')')
    monkeypatch.setattr(_devices, "_has_devices", lambda: False)
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(*next(iter(chosen.items())))
        assert local_fleet().name == "1xCPU"
        return
    with pytest.raises(InputError, match="JAX cannot use the NVIDIA GPU of this machine") as refused:
        local_fleet()
    assert how_to_install("cuda") in refused.value.hint
    attached(monkeypatch, "cpu")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    with pytest.raises(InputError, match="1xH100 is not attached") as refused:
        devices_of(Fleet.parse("1xH100"), Layout.parse("data=1"))
    assert how_to_install("cuda") in refused.value.hint


def test_a_gpu_run_takes_the_memory_it_was_weighed_with(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setattr(_devices, "_has_devices", lambda: False)
    attached(monkeypatch, H100, H100, "NVIDIA L4")
    found = devices_of(Fleet.parse("2xH100"), Layout.parse("data=2"))
    assert [device.device_kind for device in found] == [H100, H100]
    assert 0.9 < float(_devices.os.environ["XLA_CLIENT_MEM_FRACTION"]) < 1
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in _devices.os.environ  # jax refuses both together


def test_memory_that_jax_took_already_cannot_be_changed(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setattr(_devices, "_has_devices", lambda: True)
    attached(monkeypatch, H100, H100)
    with pytest.raises(MeshwrightError, match="has taken its share of the GPU's memory already") as error:
        devices_of(Fleet.parse("2xH100"), Layout.parse("data=2"))
    assert "XLA_CLIENT_MEM_FRACTION=0.9" in error.value.hint


@pytest.mark.parametrize(
    ("visible", "place", "processes", "share"),
    [
        (8, 0, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 1, 2, [4, 5, 6, 7]),
        (8, 7, 8, [7]),
        (1, 5, 8, [0]),  # the scheduler shows each process its own
    ],
)
def test_a_process_takes_its_part_of_what_its_host_has(visible, place, processes, share):
    assert share_of(visible, place, processes) == share


def test_devices_that_cannot_be_shared_are_refused():
    with pytest.raises(InputError, match="3 processes cannot share the 8 devices of a host") as error:
        share_of(8, 0, 3)
    assert error.value.hint == "start 2 or 4 processes on each host"


def test_hosts_of_one_kind_make_a_fleet():
    assert fleet_of_hosts([("a", H100, 8), ("b", H100, 8)]).name == "16xH100"
    assert fleet_of_hosts([("a", H100, 4)] * 2 + [("b", H100, 4)] * 2).name == "2x4xH100"
    assert fleet_of_hosts([(host, H100, 1) for host in "aabb"]).name == "2x2xH100"
    assert fleet_of_hosts([("a", H100, 8)] * 4).name == "8xH100"


def test_hosts_that_differ_are_named():
    with pytest.raises(InputError, match="a has 8 x NVIDIA H100 80GB HBM3; b has 8 x NVIDIA A100-SXM4-80GB"):
        fleet_of_hosts([("a", H100, 8), ("b", A100, 8)])


def test_attached_slices_are_taken_one_after_another():
    """As the step was weighed, whatever order jax lists them in."""
    kind = "TPU v5 lite"
    devices = [
        SimpleNamespace(device_kind=kind, slice_index=n % 2, id=100_000 * (n % 2 + 1) + n // 2)
        for n in range(8)
    ]
    taken = _devices._attached(Fleet.parse("2xv5e-4"), devices)
    assert [device.id for device in taken] == [first + n for first in (100_000, 200_000) for n in range(4)]
    one = [SimpleNamespace(device_kind=kind, slice_index=0) for _ in range(8)]
    with pytest.raises(InputError, match="2xv5e-4 has 2 slices of 4 devices, and the attached ones have 8"):
        _devices._attached(Fleet.parse("2xv5e-4"), one)
