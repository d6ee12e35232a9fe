from types import SimpleNamespace

from meshwright.training._run import memory_in_use


def device(**stats):
    return SimpleNamespace(memory_stats=lambda: stats or None, process_index=0)


def test_memory_in_use_is_that_of_the_fullest_device():
    assert memory_in_use([device(bytes_in_use=5), device(bytes_in_use=9)]) == 9


def test_a_device_that_does_not_tell_leaves_it_unknown():
    assert memory_in_use([device(), device(bytes_in_use=9)]) is None


def test_a_runs_seconds_are_all_accounted_for(one_device):
    measurement = one_device.measurement
    assert {"compile", "step", "input wait", "evaluation", "checkpoint"} <= set(measurement.seconds_by_phase)
    assert 0 < measurement.goodput < 1
    assert measurement.step_seconds is not None
    assert measurement.step_seconds.median * 5 < measurement.seconds_by_phase["step"] * 2
    assert (measurement.signal, measurement.resumed_from, measurement.num_bad_steps) == ("", None, 0)
