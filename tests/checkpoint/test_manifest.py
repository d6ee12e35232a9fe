from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint._manifest import MANIFEST, MANIFEST_HASH, Damaged, hash_line, verified
from meshwright.checkpoint._restore import HostArray
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


def array_of(fields: dict) -> dict:
    return fields["arrays"][0]


def piece_of(fields: dict) -> dict:
    return array_of(fields)["pieces"][0]


def halves(fields: dict, second: int) -> None:
    """Two pieces of twenty elements, the second from `second` on."""
    first = piece_of(fields) | {"shape": [20]}
    array_of(fields)["pieces"] = [first, first | {"start": [second]}]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: piece_of(f).update(file="../../../etc/hostname"), "which is no file of the checkpoint"),
        (lambda f: piece_of(f).update(file="/etc/hostname"), "which is no file of the checkpoint"),
        (lambda f: piece_of(f).update(file="manifest.json"), "which is no file of the checkpoint"),
        (lambda f: f["files"][0].update(name="../other"), "other is missing"),
        (lambda f: f["files"].append(f["files"][0]), "names a file twice"),
        (
            lambda f: piece_of(f).update(offset_bytes=8),
            "ends at byte 168 of 'arrays-0-00000.bin', which has 160",
        ),
        (lambda f: piece_of(f).update(offset_bytes=-8), r"pieces.0.offset_bytes: Input should be greater"),
        (lambda f: piece_of(f).update(start=[1]), "reaches beyond the array's shape"),
        (lambda f: piece_of(f).update(shape=[4, 10], start=[0, 0]), "has other dimensions than the array"),
        (lambda f: piece_of(f).update(shape=[39]), "do not make it up, each element once"),
        (lambda f: halves(f, 10), "do not make it up, each element once"),
        (lambda f: array_of(f).update(pieces=[]), "do not make it up, each element once"),
        (lambda f: array_of(f).update(shape=[2**60]), "shape.0: Input should be less than"),
        (lambda f: array_of(f).update(shape=[2**50, 2**50, 0], pieces=[]), "larger than any array"),
        (lambda f: array_of(f).update(dtype="object"), "is of 'object', which is no format of numbers"),
        (lambda f: array_of(f).update(dtype="nonsense"), "is of 'nonsense', which is no format"),
        (lambda f: f["arrays"].append(array_of(f)), "names an array twice"),
        (lambda f: array_of(f).pop("dtype"), "arrays.0.dtype: Field required"),
        (lambda f: array_of(f).update(more=1), "arrays.0.more: Unexpected keyword argument"),
        (lambda f: f.pop("about"), "about: Field required"),
        (lambda f: f.pop("format"), "format: Field required"),
        (lambda f: f.update(step="3"), "step: Input should be a valid integer"),
        (lambda f: f.update(arrays={}), "arrays: Input should be a valid array"),
        (lambda f: f["files"][0].update(sha256="x"), "files.0.sha256: String should match pattern"),
    ],
)
def test_a_manifest_of_a_stranger_whose_hash_fits_is_damage(folder: Path, change: Callable, why: str):
    change_manifest(folder, change)
    with pytest.raises(Damaged, match=why):
        verified(folder, 3)


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"null", b"\xff", b'{"a":' * 5000, b'{"format": 1}'])
def test_a_manifest_that_is_no_manifest_is_damage(folder: Path, text: bytes):
    (folder / MANIFEST).write_bytes(text)
    (folder / MANIFEST_HASH).write_bytes(hash_line(text))
    with pytest.raises(Damaged, match=r"manifest\.json is not as Meshwright writes it: "):
        verified(folder, 3)


def test_pieces_that_make_up_an_array_in_parts_are_whole(folder: Path):
    change_manifest(folder, lambda fields: halves(fields, 20))
    assert len(verified(folder, 3).arrays[0].pieces) == 2


def test_a_manifest_that_is_a_link_is_named(folder: Path):
    (folder / MANIFEST).rename(folder.parent / "elsewhere")
    (folder / MANIFEST).symlink_to(folder.parent / "elsewhere")
    with pytest.raises(Damaged, match=r"manifest\.json is no file"):
        verified(folder, 3)
