"""Safetensors files that are whole are read as they were written; of others it is said what is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.contrib.huggingface import FirstWeights, WeightFiles, write_files
from meshwright.errors import InputError

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
        (-1, "is cut off: 'second' ends beyond its 31 bytes of data"),
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


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS = {
    "a negative range": ({"a": entry(-16, -8)}, "'a' has no dtype, shape and data_offsets of whole numbers"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, "the array before it ends at 8"),
    "a hole": ({"a": entry(8, 16)}, "'a' is at bytes 8 to 16 of the data"),
    "bytes of no array": ({"a": entry(0, 8)}, "its arrays end at byte 8 of 16"),
    "beyond the end": ({"a": entry(0, 8), "b": entry(8, 80, (18,))}, "is cut off: 'b' ends beyond its 16"),
    "another size": ({"a": entry(0, 16, (3,))}, "12 bytes, and its range 16"),
    "a negative size": ({"a": entry(0, 16, (-1,))}, "whole numbers"),
    "a backward range": (
        {"a": entry(0, 16, (4,)), "b": entry(16, 8, dtype="I64")},
        "'b' is at bytes 16 to 8",
    ),
    "fractions": ({"a": entry(0.0, 16.0, (4,))}, "whole numbers"),
    "true": ({"a": entry(False, 16, (4,))}, "whole numbers"),
    "a list": ([1], "its header is not an object"),
}


def written(folder, header: bytes):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    return folder


@pytest.mark.parametrize(("header", "words"), HEADERS.values(), ids=list(HEADERS))
def test_a_header_that_no_library_writes_is_refused(header, words, tmp_path):
    with pytest.raises(InputError, match=rf"model\.safetensors cannot be read: .*{words}"):
        WeightFiles(written(tmp_path, json.dumps(header).encode()))


def test_a_name_given_twice_and_a_header_of_depth_alone_are_refused(tmp_path):
    one = json.dumps(entry(0, 16, (4,)))
    with pytest.raises(InputError, match="the name 'a' is given twice"):
        WeightFiles(written(tmp_path, f'{{"a": {one}, "a": {one}}}'.encode()))
    with pytest.raises(InputError, match="nested 200000 levels deep"):
        WeightFiles(written(tmp_path, b"[" * 200_000))
    written(tmp_path, f'{{"a": {one}}}'.encode()).joinpath("model.safetensors").rename(
        tmp_path / "x.safetensors"
    )
    written(tmp_path, f'{{"a": {one}}}'.encode()).joinpath("model.safetensors").rename(
        tmp_path / "y.safetensors"
    )
    with pytest.raises(InputError, match=r"y\.safetensors has 'a', which another file there has too"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("file", ["../b.safetensors", "/etc/passwd", "x/../../b.safetensors", 5, ["a"]])
def test_an_index_stays_in_its_folder(file, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    written(tmp_path, json.dumps({"secret": entry(0, 16, (4,))}).encode())
    (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"secret": file}}))
    with pytest.raises(InputError, match="is not the name of a file in its folder"):
        WeightFiles(model)


def test_an_index_says_which_file_an_array_is_of(folder):
    """Caches of models keep links to files elsewhere, which are followed."""
    (file,) = folder.glob("*.safetensors")
    file.rename(folder.parent / "blob")
    (folder / "part-1.safetensors").symlink_to(folder.parent / "blob")
    index = {"weight_map": {"first": "part-1.safetensors", "absent": "part-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert WeightFiles(folder).names == {"first"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[]", "cannot be read: it has no model_type"),
        ('{"name": "bytes-nano"}', "cannot be read: it has no model_type"),  # the folder of a run
    ],
)
def test_a_folder_without_a_models_configuration_gives_no_first_weights(text, words, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        FirstWeights(tmp_path, load_config("bytes-nano"))
