from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint._copy import HostArray
from meshwright.checkpoint._manifest import MANIFEST, MANIFEST_HASH, Damaged, hash_line, verified
from meshwright.checkpoint._write import write_manifest, write_part

DATA = "arrays-0-00000.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "3"
    made.mkdir()
    values = np.arange(40, dtype=np.float32)
    array = HostArray(path="a", shape=(40,), dtype="float32", starts=((0,),), pieces=(values,))
    write_manifest(made, [write_part(made, 3, [array], 0)], {"note": "x"})
    return made


def change_manifest(folder: Path, change: Callable[[dict], None]) -> None:
    """As another writer would have written it: the hash fits."""
    fields = json.loads((folder / MANIFEST).read_bytes())
    change(fields)
    text = json.dumps(fields).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / MANIFEST_HASH).write_bytes(hash_line(text))


def test_a_whole_checkpoint_is_verified(folder: Path):
    assert verified(folder, 3).num_bytes == 160


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.long)])  # 9: each place in a byte
@pytest.mark.parametrize("name", [DATA, MANIFEST, MANIFEST_HASH])
def test_every_flipped_bit_of_every_file_is_found(folder: Path, name: str, stride: int):
    good = (folder / name).read_bytes()
    for bit in range(0, 8 * len(good), stride):
        altered = bytearray(good)
        altered[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(altered)
        with pytest.raises(Damaged, match=f"{name}.*altered"):
            verified(folder, 3)
    (folder / name).write_bytes(good)
    verified(folder, 3)


@pytest.mark.parametrize("name", [DATA, MANIFEST, MANIFEST_HASH])
def test_a_missing_file_is_named(folder: Path, name: str):
    (folder / name).unlink()
    with pytest.raises(Damaged, match=f"{name} is missing"):
        verified(folder, 3)


def test_a_cut_file_is_named_with_its_sizes(folder: Path):
    with (folder / DATA).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(Damaged, match=f"{DATA} has 100 bytes of 160"):
        verified(folder, 3)


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST_HASH])
def test_a_cut_manifest_is_named(folder: Path, name: str):
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(Damaged, match="was altered: the one is not the hash of the other"):
        verified(folder, 3)


def test_a_file_that_the_manifest_does_not_know_is_named(folder: Path):
    (folder / "notes.txt").write_text("")
    with pytest.raises(Damaged, match=r"notes\.txt is not in manifest\.json"):
        verified(folder, 3)


def test_something_else_in_a_files_place_is_named(folder: Path):
    (folder / DATA).rename(folder.parent / "elsewhere")
    (folder / DATA).symlink_to(folder.parent / "elsewhere")
    with pytest.raises(Damaged, match=f"{DATA} is no file"):
        verified(folder, 3)


def test_a_checkpoint_under_another_steps_name_is_told(folder: Path):
    with pytest.raises(Damaged, match=r"manifest\.json is of step 3"):
        verified(folder, 4)


def test_a_format_of_another_version_is_told(folder: Path):
    change_manifest(folder, lambda fields: fields.update(format=2))
    with pytest.raises(Damaged, match="has format 2, and this Meshwright reads 1"):
        verified(folder, 3)


def test_what_cannot_be_read_is_told_with_the_systems_reason(folder: Path):
    (folder / MANIFEST_HASH).unlink()
    (folder / MANIFEST_HASH).mkdir()
    with pytest.raises(Damaged, match=r"manifest\.json\.sha256 cannot be read: Is a directory"):
        verified(folder, 3)
