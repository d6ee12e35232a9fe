from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from meshwright.contrib.torch_eager import SAVED, TEMPORARY, Storages  # noqa: E402


def test_a_storage_is_counted_once_until_it_is_freed():
    storages = Storages()
    whole = torch.empty(10)
    view = whole[2:4]
    storages.see(whole)
    storages.see(view)
    assert storages.live_bytes == 40
    del whole
    assert storages.live_bytes == 40  # the view keeps it
    del view
    assert storages.live_bytes == 0


def test_a_storage_that_grows_is_counted_anew():
    storages, tensor = Storages(), torch.empty(10)
    storages.see(tensor)
    tensor.untyped_storage().resize_(80)
    storages.see(tensor)
    assert storages.live_bytes == 80


def test_what_is_saved_counts_as_saved_while_it_is_kept():
    storages, tensor = Storages(), torch.empty(10)
    first, second = storages.save(tensor), storages.save(tensor[1:])
    assert dict(storages.live) == {TEMPORARY: 0, SAVED: 40}
    storages.release(first)
    assert storages.live[SAVED] == 40
    storages.release(second)
    assert dict(storages.live) == {TEMPORARY: 40, SAVED: 0}


def test_a_parameter_that_is_saved_stays_a_parameter():
    storages, tensor = Storages(), torch.empty(10)
    storages.put(tensor, "parameters")
    storages.save(tensor)
    storages.put(tensor, "inputs")
    assert storages.live["parameters"] == 40
    assert storages.live[SAVED] == storages.live["inputs"] == 0
    assert storages.by_format() == {"parameters": {"fp32": 40}}


def test_releasing_what_is_gone_already_does_nothing():
    storages, tensor = Storages(), torch.empty(10)
    key = storages.save(tensor)
    del tensor
    storages.release(key)
    assert storages.live_bytes == 0


def test_the_peak_is_of_the_fullest_instant_with_what_it_held():
    storages = Storages()
    kept, gone = torch.empty(10), torch.empty(20)
    storages.put(kept, "parameters")
    storages.see(gone)
    storages.note_peak("forward")
    del gone
    storages.note_peak("backward")
    assert (storages.peak_bytes, storages.peak_phase) == (120, "forward")
    assert {k: v for k, v in storages.at_peak.items() if v} == {"parameters": 40, TEMPORARY: 80}


def test_what_lived_all_along_is_added_to_the_peak_once():
    storages, state = Storages(), torch.empty(10)
    storages.put(state, "optimizer state")
    storages.add_to_peak("optimizer state")
    storages.add_to_peak("optimizer state")
    assert (storages.peak_bytes, storages.at_peak) == (40, {"optimizer state": 40})
