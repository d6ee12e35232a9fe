import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import open_tokenizer
from meshwright.data._texts import pieces_of
from meshwright.data._tokenize import (
    Part,
    Settings,
    as_dtype,
    finished_part,
    make_part,
    part_path,
    sha256_of,
    write_whole,
)
from meshwright.errors import InputError, MeshwrightError

SETTINGS = Settings(
    tokenizer="bytes", tokenizer_sha256=None, dtype="uint16", end_of_document=256, text_key="text"
)


@pytest.fixture
def piece(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": ""}\n')
    return pieces_of([str(tmp_path / "a.jsonl")], 1 << 20)[0]


def test_a_part_holds_the_tokens_and_the_ends_of_its_documents(tmp_path: Path, piece):
    path = part_path(tmp_path, piece, SETTINGS)
    assert finished_part(path, "uint16") is None
    made = make_part(path, piece, SETTINGS, open_tokenizer("bytes"))
    assert made == Part(num_tokens=4, num_documents=2) == finished_part(path, "uint16")
    assert np.fromfile(path, "<u2").tolist() == [97, 98, 256, 256]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_part_counts_as_done_only_when_it_is_whole(tmp_path: Path, piece):
    path = part_path(tmp_path, piece, SETTINGS)
    make_part(path, piece, SETTINGS, open_tokenizer("bytes"))
    record, content = path.with_suffix(".json"), path.read_bytes()
    path.write_bytes(content[:-1])
    assert finished_part(path, "uint16") is None
    path.write_bytes(content)
    for damaged in (b"", b"{", b"[1]", b'{"num_tokens": 4}'):
        record.write_bytes(damaged)
        assert finished_part(path, "uint16") is None
    path.unlink()
    assert finished_part(path, "uint16") is None


def test_another_text_or_setting_has_another_part(tmp_path: Path, piece):
    variants = [
        part_path(tmp_path, piece, SETTINGS),
        part_path(tmp_path, piece, replace(SETTINGS, dtype="int32")),
        part_path(tmp_path, piece, replace(SETTINGS, tokenizer_sha256="0")),
        part_path(tmp_path, piece, replace(SETTINGS, end_of_document=None)),
        part_path(tmp_path, replace(piece, modified_ns=1), SETTINGS),
        part_path(tmp_path, replace(piece, start=1), SETTINGS),
    ]
    assert len(set(variants)) == len(variants)


def test_ids_beyond_the_type_are_refused():
    settings = replace(SETTINGS, end_of_document=None)
    assert as_dtype(np.array([0, 65535], np.uint32), settings, "a").dtype == np.dtype("<u2")
    with pytest.raises(InputError, match="a: the tokenizer gives id 65536, and uint16 holds at most 65535"):
        as_dtype(np.array([65536], np.uint32), settings, "a")


def test_the_hash_is_that_of_the_bytes(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of(str(tmp_path / "a")) == wanted


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(MeshwrightError, match=r"cannot write .*No such file.* bytes are free") as caught:
        write_whole(tmp_path / "a" / "b", b"")
    assert "goes on where it stopped" in caught.value.hint


def test_what_a_killed_process_half_wrote_is_not_a_part(tmp_path: Path, piece):
    path = part_path(tmp_path, piece, SETTINGS)
    path.with_name(f"{path.name}.{os.getpid()}.tmp").write_bytes(b"ab")
    assert finished_part(path, "uint16") is None
