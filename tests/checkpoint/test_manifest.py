from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from meshwright.trainer.checkpoint import MANIFEST, MANIFEST_HASH, Checkpoints, Damaged, hash_line, verified

FILES = [
    "state/d/*",
    "state/manifest.ocdbt",
    "state/_METADATA",
    "_CHECKPOINT_METADATA",
    MANIFEST,
    MANIFEST_HASH,
]


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    checkpoints.save(3, {"a": jnp.arange(40, dtype=jnp.float32)}, {"note": "x"})
    checkpoints.wait()
    return tmp_path / "checkpoints" / "3"


def the_file(folder: Path, pattern: str) -> Path:
    """Return a file of that pattern; on a busy machine TensorStore may write two where one would do."""
    return min(folder.glob(pattern))


def change_manifest(folder: Path, change: Callable[[dict], None]) -> None:
    """As another writer would have written it: the hash fits."""
    fields = json.loads((folder / MANIFEST).read_bytes())
    change(fields)
    text = json.dumps(fields).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / MANIFEST_HASH).write_bytes(hash_line(text))


def test_a_whole_checkpoint_is_verified(folder: Path):
    manifest = verified(folder, 3)
    listed = {folder / file.name for file in manifest.files} | {folder / MANIFEST, folder / MANIFEST_HASH}
    assert manifest.about == {"note": "x"}
    assert listed == {path for path in folder.rglob("*") if path.is_file()}


def test_hashes_are_those_of_sha256sum(folder: Path):
    for file in verified(folder, 3).files:
        run = subprocess.run(["sha256sum", file.name], cwd=folder, capture_output=True, text=True, check=True)
        assert run.stdout.split()[0] == file.sha256
    check = ["sha256sum", "--check", "manifest.json.sha256"]
    subprocess.run(check, cwd=folder, capture_output=True, check=True)


@pytest.mark.parametrize("stride", [33, pytest.param(1, marks=pytest.mark.long)])  # 33: each place in a byte
@pytest.mark.parametrize("pattern", FILES)
def test_every_flipped_bit_of_every_file_is_found(folder: Path, pattern: str, stride: int):
    path = the_file(folder, pattern)
    good = path.read_bytes()
    for bit in range(0, 8 * len(good), stride):
        altered = bytearray(good)
        altered[bit // 8] ^= 1 << bit % 8
        path.write_bytes(altered)
        with pytest.raises(Damaged, match=f"{path.name}.*altered"):
            verified(folder, 3)
    path.write_bytes(good)
    verified(folder, 3)


@pytest.mark.parametrize("pattern", FILES)
def test_a_missing_file_is_named(folder: Path, pattern: str):
    path = the_file(folder, pattern)
    path.unlink()
    with pytest.raises(Damaged, match=f"{path.relative_to(folder)} is missing"):
        verified(folder, 3)


def test_a_cut_file_is_named_with_its_sizes(folder: Path):
    path = the_file(folder, FILES[0])
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(Damaged, match=f"{path.name} has 100 bytes of {size:,}"):
        verified(folder, 3)


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST_HASH])
def test_a_cut_manifest_is_named(folder: Path, name: str):
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(Damaged, match="was altered: the one is not the hash of the other"):
        verified(folder, 3)


def test_a_file_that_the_manifest_does_not_know_is_named(folder: Path):
    (folder / "state" / "notes.txt").write_text("")
    with pytest.raises(Damaged, match=r"state/notes\.txt is not in manifest\.json"):
        verified(folder, 3)


def test_something_else_in_a_files_place_is_named(folder: Path):
    path = the_file(folder, FILES[0])
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(Damaged, match=f"{path.name} is not a file"):
        verified(folder, 3)


def test_a_checkpoint_under_another_steps_name_is_told(folder: Path):
    with pytest.raises(Damaged, match=r"manifest\.json is of step 3"):
        verified(folder, 4)


def test_a_format_of_another_version_is_told(folder: Path):
    change_manifest(folder, lambda fields: fields.update(format=3))
    with pytest.raises(Damaged, match="has format 3, and this Meshwright reads 1 and 2"):
        verified(folder, 3)


def test_what_cannot_be_read_is_told_with_the_systems_reason(folder: Path):
    (folder / MANIFEST_HASH).unlink()
    (folder / MANIFEST_HASH).mkdir()
    with pytest.raises(Damaged, match=r"manifest\.json\.sha256 cannot be read: Is a directory"):
        verified(folder, 3)


def array_of(fields: dict) -> dict:
    return fields["arrays"][0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: f["files"].append(f["files"][0]), "names a file twice"),
        (lambda f: f["files"][0].update(name="../../../etc/passwd"), "passwd is missing"),
        (lambda f: array_of(f).update(shape=[-1]), "shape.0: Input should be greater than or equal to 0"),
        (lambda f: array_of(f).update(shape=[2**60]), "shape.0: Input should be less than"),
        (lambda f: array_of(f).update(pieces=[]), "arrays of another format than 2"),
        (lambda f: f.update(format=1), "arrays of another format than 1"),
        (lambda f: f["arrays"].append(array_of(f)), "names an array twice"),
        (lambda f: array_of(f).pop("dtype"), "arrays.0.dtype: Field required"),
        (lambda f: array_of(f).update(more=1), "arrays.0.more: Unexpected keyword argument"),
        (lambda f: f.pop("about"), "about: Field required"),
        (lambda f: f.pop("format"), "format: Field required"),
        (lambda f: f.update(step="3"), "step: Input should be a valid integer"),
        (lambda f: f.update(arrays={}), "arrays: Input should be a valid array"),
        (lambda f: array_of(f).update(shape=[10**6]), "have .* bytes, and the arrays need 4,000,000"),
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


def test_a_manifest_that_is_a_link_is_named(folder: Path):
    (folder / MANIFEST).rename(folder.parent / "elsewhere")
    (folder / MANIFEST).symlink_to(folder.parent / "elsewhere")
    with pytest.raises(Damaged, match=r"manifest\.json is not a file"):
        verified(folder, 3)


def test_a_manifest_must_name_the_files_of_its_arrays(folder: Path):
    shutil.rmtree(folder / "state/d")
    (folder / "state/manifest.ocdbt").unlink()
    change_manifest(folder, lambda f: f.update(files=[x for x in f["files"] if "METADATA" in x["name"]]))
    with pytest.raises(Damaged, match=r"does not name state/manifest\.ocdbt, which holds the arrays"):
        verified(folder, 3)
