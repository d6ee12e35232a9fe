from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint import _write
from meshwright.checkpoint._manifest import verified
from meshwright.checkpoint._restore import HostArray, whole_array
from meshwright.checkpoint._write import leave_part, take_part, write_manifest, write_part


def host(path: str, values: np.ndarray, num_pieces: int = 1) -> HostArray:
    rows = len(values) // num_pieces
    pieces = tuple(values[row : row + rows] for row in range(0, len(values), rows))
    starts = tuple((row, *(0,) * (values.ndim - 1)) for row in range(0, len(values), rows))
    name = values.dtype.name
    return HostArray(path=path, shape=values.shape, dtype=name, starts=starts, pieces=pieces)


def test_what_was_written_is_verified_and_read_back(tmp_path: Path):
    folder = tmp_path / "7"
    folder.mkdir()
    values = np.arange(24, dtype=np.float32).reshape(8, 3)
    write_manifest(
        folder,
        [write_part(folder, 7, [host("a", values, 4), host("b", values[:, 0].copy())], 0)],
        {"lr": 0.1},
    )
    manifest = verified(folder, 7)
    assert manifest.about == {"lr": 0.1}
    np.testing.assert_array_equal(whole_array(folder, manifest.arrays[0]), values)
    np.testing.assert_array_equal(whole_array(folder, manifest.arrays[1]), values[:, 0])


def test_large_arrays_are_cut_and_files_stay_about_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_write, "FILE_BYTES", 1000)
    folder = tmp_path / "1"
    folder.mkdir()
    values = np.arange(2000, dtype=np.int32).reshape(100, 20)
    manifest = write_manifest(
        folder, [write_part(folder, 1, [host("a", values, 2), host("b", values[:1])], 0)], {}
    )
    sizes = [file.num_bytes for file in manifest.files]
    assert len(sizes) > 4
    assert max(sizes) <= 2000
    assert sum(sizes) >= values.nbytes
    np.testing.assert_array_equal(whole_array(folder, verified(folder, 1).arrays[0]), values)


def test_every_piece_begins_at_a_multiple_of_64_bytes(tmp_path: Path):
    arrays = [
        host(name, np.ones(size, np.uint8)) for name, size in (("a", 1), ("b", 65), ("c", 64), ("d", 3))
    ]
    manifest = write_manifest(tmp_path, [write_part(tmp_path, 1, arrays, 0)], {})
    offsets = [array.pieces[0].offset_bytes for array in manifest.arrays]
    assert offsets == [0, 64, 192, 256]
    assert manifest.files[0].num_bytes == 259


def test_hashes_are_those_of_sha256sum(tmp_path: Path):
    manifest = write_manifest(tmp_path, [write_part(tmp_path, 1, [host("a", np.arange(5000.0))], 0)], {})
    command = ["sha256sum", manifest.files[0].name]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == manifest.files[0].sha256
    check = ["sha256sum", "--check", "manifest.json.sha256"]
    subprocess.run(check, cwd=tmp_path, capture_output=True, check=True)


def test_the_parts_of_several_processes_make_one_checkpoint(tmp_path: Path):
    folder = tmp_path / "3"
    folder.mkdir()
    values = np.arange(24, dtype=np.float32).reshape(8, 3)
    first = host("a", values[:4], 2)
    last = host("a", values[4:], 1)
    first = dataclasses.replace(first, shape=values.shape)
    last = dataclasses.replace(last, shape=values.shape, starts=((4, 0),))
    parts = [write_part(folder, 3, [first], 0)]
    leave_part(folder, write_part(folder, 3, [last], 1), 1)
    parts.append(take_part(folder, 1))
    write_manifest(folder, parts, {"lr": 0.1})
    manifest = verified(folder, 3)  # which refuses a file that is not in it
    assert manifest.about == {"lr": 0.1}
    assert [file.name for file in manifest.files] == ["arrays-0-00000.bin", "arrays-1-00000.bin"]
    np.testing.assert_array_equal(whole_array(folder, manifest.arrays[0]), values)


def test_a_part_that_is_not_there_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        take_part(tmp_path, 1)
