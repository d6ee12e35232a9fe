"""Safetensors files that are whole are read as they were written; of others it is said what is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.weights import WeightFiles, write_files

ARRAYS = {"first": np.arange(6, dtype=np.float32).reshape(2, 3), "second": np.ones(4, np.float16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path, iter(ARRAYS.items()), shard_bytes=10**6)
    return tmp_path


def test_what_is_written_is_read(folder):
    files = WeightFiles(folder)
    assert files.names == set(ARRAYS)
    for name, array in ARRAYS.items():
        found = files.read(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_a_name_that_no_file_has_is_answered_with_the_nearest(folder):
    with pytest.raises(InputError, match="has no array 'secnd'") as refused:
        WeightFiles(folder).read("secnd")
    assert "second" in refused.value.hint


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (-1, "is cut off: .* ends beyond its"),
        (20, "is cut off"),
        (0, "is no safetensors file, or is cut off"),
    ],
)
def test_a_file_that_was_not_downloaded_whole_is_refused(folder, keep, words):
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match=words) as refused:
        WeightFiles(folder)
    assert refused.value.hint == "download it again"


def test_a_header_that_names_no_arrays_is_refused(folder):
    (file,) = folder.glob("*.safetensors")
    header = json.dumps({"first": {"dtype": "F32"}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match="cannot be read"):
        WeightFiles(folder)


def test_an_index_that_is_none_and_a_folder_without_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no safetensors file is in"):
        WeightFiles(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match=r"index\.json cannot be read"):
        WeightFiles(tmp_path)
