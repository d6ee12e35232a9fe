"""PyTorch's sentence in its wordings, and its snapshots, which are written here as PyTorch writes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import InputError

GIB, MIB = 2**30, 2**20
Log = Callable[[str | bytes], Path]

NEW = (Path(__file__).parent / "samples" / "torch.txt").read_text()


def test_newest_sentence_in_a_log_of_several_ranks(log: Log) -> None:
    made = mw.explain_file(log(NEW))
    assert made.line == (
        "model.py:30 (forward) asked for 2.00 GiB more where 512 MiB of 79.2 GiB were free on device 2"
    )
    assert made.needed_bytes == 72 * GIB
    assert made.missing_bytes == 1.5 * GIB
    assert made.what_must_go == "1.50 GiB must go"
    assert made.parts == {
        "in tensors": 70 * GIB,
        "free in PyTorch's cache, in pieces": 6 * GIB,
        "of this process outside PyTorch: CUDA's context, NCCL, libraries": 1.75 * GIB,
        "of other processes": GIB,
        "free": 512 * MIB,
        "asked for": 2 * GIB,
    }
    saved = {each.change: each.saved_bytes for each in made.settings}
    assert saved["PYTORCH_ALLOC_CONF=expandable_segments:True"] == 6 * GIB
    assert saved["end the other processes on the device"] == GIB


@pytest.mark.parametrize(
    ("sentence", "tensors", "pieces", "free"),
    [
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 8.00 GiB total "
            "capacity; 5.00 GiB "
            "already allocated; 1.00 GiB free; 6.00 GiB reserved in total by PyTorch)",
            5,
            1,
            1,
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 8.00 GiB total "
            "capacity; 5.00 GiB "
            "already allocated; 1.00 GiB free; 2.00 GiB cached)",
            5,
            2,
            1,
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a "
            "total capacty "
            "of 8.00 GiB of which 1.00 GiB is free. Of the allocated memory 5.00 GiB is allocated by "
            "PyTorch, with "
            "1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by "
            "PyTorch but "
            "unallocated.",
            5,
            0.5,
            1,
        ),
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total "
            "capacity of "
            "8.00 GiB of which 1.00 GiB is free. Of the allocated memory 5.00 GiB is allocated by "
            "PyTorch, and 0 "
            "bytes is reserved by PyTorch but unallocated.",
            5,
            0,
            1,
        ),
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 5.00 GB, other allocations: 2.00 "
            "GB, max "
            "allowed: 8.00 GB). Tried to allocate 1.50 GB on private pool.",
            5,
            None,
            1,
        ),
    ],
)
def test_wordings(log: Log, sentence: str, tensors: float, pieces: float | None, free: float) -> None:
    made = mw.explain_file(log(sentence))
    assert made.parts["in tensors"] == tensors * GIB
    assert made.parts.get("free in PyTorch's cache, in pieces") == (None if pieces is None else pieces * GIB)
    assert (made.missing_bytes, made.usable_bytes) == ((1.5 - free) * GIB, 8 * GIB)
    saved = {each.change: each.saved_bytes for each in made.settings}
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in saved) == bool(pieces)


def test_limit_of_the_process_counts_and_not_the_devices(log: Log) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
        "which 60.00 GiB "
        "is free. Including non-PyTorch memory, this process has 19.00 GiB memory in use. 20.00 GiB "
        "allowed; Of the "
        "allocated memory 18.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    )
    made = mw.explain_file(log(text))
    assert made.missing_bytes == GIB
    assert any("memory_fraction" in each.change and each.saved_bytes == 60 * GIB for each in made.settings)


def _frames(*places: tuple[str, int, str]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in places]


LIBRARY = "/env/lib/python3.12/site-packages/torch/nn/modules/module.py"
OPTIMIZER = "/env/lib/python3.12/site-packages/torch/optim/adamw.py"
FORWARD = _frames(("??", 0, "at::empty"), ("/me/model.py", 30, "forward"), (LIBRARY, 1700, "_call_impl"))
STATE = _frames((OPTIMIZER, 200, "_init_group"), ("/me/train.py", 50, "main"))
WEIGHTS = _frames((LIBRARY, 900, "_apply"), ("/me/train.py", 12, "main"))
ASKED = _frames((LIBRARY, 1700, "_call_impl"), ("/me/model.py", 31, "forward"))


def _block(address: int, size: int, frames: Any, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _segment(address: int, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    total = sum(each["size"] for each in blocks)
    return {"device": device, "address": address, "total_size": total, "stream": 0, "blocks": blocks,
            "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}  # fmt: skip


def _event(action: str, address: int, size: int, frames: Any = None, **more: int) -> dict[str, Any]:
    where = {} if action == "oom" else {"addr": address}
    return {
        "action": action,
        "size": size,
        "stream": 0,
        "frames": frames or [],
        "time_us": 1,
        **where,
        **more,
    }


def _failed() -> dict[str, Any]:
    """A device whose activations are gone by the time the snapshot is written, and which ran out before."""
    segment = _segment(0, [_block(0, 4 * GIB, WEIGHTS), _block(4 * GIB, 6 * GIB, None, "inactive")])
    events = [
        _event("segment_alloc", 0, 10 * GIB),
        _event("alloc", 4 * GIB, GIB, STATE),
        _event("alloc", 5 * GIB, 3 * GIB, FORWARD),
        _event("alloc", 8 * GIB, GIB, FORWARD),
        _event("free_requested", 8 * GIB, GIB),
        _event("free_completed", 8 * GIB, GIB),
        _event("oom", 0, 3 * GIB, ASKED, device_free=GIB),
        _event("free_completed", 5 * GIB, 3 * GIB),
        _event("free_completed", 4 * GIB, GIB),
        _event("snapshot", 0, 0),
    ]
    return {
        "segments": [segment],
        "device_traces": [events],
        "allocator_settings": {"max_split_size": -1, "x": 0.5},
    }


@pytest.fixture
def snapshot(tmp_path: Path) -> Callable[..., Path]:
    """Writes a snapshot as PyTorch does."""

    def write(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> Path:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps(value, protocol))
        return path

    return write


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_snapshot_explains_the_moment_at_which_memory_ran_out(
    snapshot: Callable[..., Path], protocol: int
) -> None:
    made = mw.explain_file(snapshot(_failed(), protocol))
    assert made.line == (
        "model.py:31 (forward) asked for 3.00 GiB more where 1.00 GiB were free on device 0: "
        "4.00 GiB are 1 block of train.py:12"
    )
    rows = [(each.num_bytes, each.place, each.category, each.module) for each in made.held]
    assert rows == [
        (4 * GIB, "train.py:12", "parameters", "main"),
        (3 * GIB, "model.py:30", "forward pass", "forward"),
        (GIB, "train.py:50", "optimizer", "main"),
    ]
    assert made.parts["in tensors"] == 8 * GIB
    assert made.parts["free in PyTorch's cache, in pieces"] == 2 * GIB
    assert made.missing_bytes == 2 * GIB
    saved = {each.change: each.saved_bytes for each in made.settings}
    assert saved["PYTORCH_ALLOC_CONF=expandable_segments:True"] == 2 * GIB
    assert saved["torch.utils.checkpoint around model.py:30 (forward)"] == 3 * GIB


def test_snapshot_without_a_failure_explains_its_highest_point(snapshot: Callable[..., Path]) -> None:
    value = _failed()
    value["device_traces"][0] = [each for each in value["device_traces"][0] if each["action"] != "oom"]
    made = mw.explain_file(snapshot(value))
    assert made.needed_bytes == 9 * GIB
    assert "at the highest point of its history" in made.line
    assert made.missing_bytes is None


def test_snapshot_without_a_history_says_how_to_have_one(snapshot: Callable[..., Path]) -> None:
    blocks = [_block(0, GIB, []), _block(GIB, 3 * GIB, [], "inactive"), _block(4 * GIB, MIB, [])]
    value = {
        "segments": [_segment(0, blocks), _segment(2**40, [_block(2**40, MIB, [])], 1)],
        "device_traces": [[], []],
    }
    made = mw.explain_file(snapshot(value))
    assert (made.needed_bytes, made.parts["free in PyTorch's cache, in pieces"]) == (GIB + MIB, 3 * GIB)
    assert any("_record_memory_history" in note for note in made.notes)
    assert any("device 1" in note for note in made.notes)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not be printed",)


def _cyclic() -> dict[str, Any]:
    loop: list[Any] = []
    loop.append(loop)
    return {"segments": loop, "device_traces": []}


def _shared() -> dict[str, Any]:
    """A small file in which a ten thousand blocks are named a hundred million times."""
    segment = _segment(0, [_block(0, 1, FORWARD)] * 10_000)
    return {"segments": [segment] * 10_000, "device_traces": []}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"segments": [_Evil()]}, "would run code"),
        ({"segments": [print]}, "builtins.print"),
        ({"segments": {1, 2}}, "would run code"),
        ({"segments": [{"device": 0, "total_size": -1, "blocks": []}]}, "total_size is '-1'"),
        ({"segments": [{"device": 0, "total_size": 2**90, "blocks": []}]}, "total_size is"),
        ({"segments": [7]}, "has int where"),
        ({"segments": [_segment(0, [_block(0, 1, [5])])]}, "has int where"),
        ({"segments": [], "device_traces": 5}, "has int where a list"),
        ({"model": 1}, "it has no segments; it is a table of model"),
        ([1, 2], "no table"),
        (_cyclic(), "has list where"),
        (_shared(), "twice"),
        ({"segments": [{"device": 0, "total_size": 1, "blocks": [], "x": 2**200}]}, "an integer has"),
    ],
)
def test_odd_snapshots_are_refused_in_words(
    snapshot: Callable[..., Path], value: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="cannot be read as a snapshot") as refused:
        mw.explain_file(snapshot(value))
    assert words in refused.value.message
    assert "must not be printed" not in capsys.readouterr().out


def test_every_shortened_snapshot_is_refused_in_words(snapshot: Callable[..., Path]) -> None:
    path = snapshot(_failed())
    whole = path.read_bytes()
    for length in range(2, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            mw.explain_file(path)


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x04r\xff\xff\xff\xff.",  # keeps a value under the largest number
        b"\x80\x04]r\xff\xff\xff\x7f.",
        b"\x80\x04" + b"(" * 5000 + b".",
        b"\x80\x04" + b"}" * 10 + b"u.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",  # a text of 2**64 bytes
        b"\x80\x04h\x07.",
        b"\x80\x04a.",
        b"\x80\x04\x85.",
        b"\x80\x04}]K\x01s.",
        b"\x80\x04N.",
        b"\x80\x04\xff.",
        b"\x80\x04" + b"N\x85" + b"\x85" * 200_000 + b".",
    ],
)
def test_opcodes_that_no_writer_makes_are_refused(tmp_path: Path, code: bytes) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(code)
    with pytest.raises(InputError, match="cannot be read as a snapshot"):
        mw.explain_file(path)
