"""Somebody's own data: what a path holds is found out, texts are tokenized once, wrong widths are noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.config import load_config, overridden
from meshwright.contrib.texts import own_data, tokenize
from meshwright.errors import InputError
from meshwright.trainer.data import TokenWindows, data_identity, open_data

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


def opened(path: Path, **given: Any) -> tuple[Any, tuple[str, ...]]:
    """The data set that `train bytes-nano --data PATH` reads, and its notes."""
    run = load_config("bytes-nano")
    found = own_data(str(path), run, given)
    return open_data(overridden(run, {**found.overrides, **given})), found.notes


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(each) for each in records))
    return path


def test_a_text_is_tokenized_once_and_leaves_the_model_as_it_is(tmp_path: Path):
    (tmp_path / "book.txt").write_text(TEXT)
    data, notes = opened(tmp_path / "book.txt")
    assert notes == ()
    assert (data.vocab_size, data.is_bytes) == (256, True)
    assert data.decode(data.parts["train"][:12]) == TEXT[:12]
    (made,) = (tmp_path / "cache" / "tokens").glob("*.bin")
    before = made.stat().st_ino
    opened(tmp_path / "book.txt")
    assert made.stat().st_ino == before
    (tmp_path / "book.txt").write_text(TEXT[::-1])  # a changed text is another one
    assert opened(tmp_path / "book.txt")[0].decode(data.parts["train"][:0]) == ""
    assert len(list((tmp_path / "cache" / "tokens").glob("*.bin"))) == 2


@pytest.mark.parametrize("key", ["text", "content"])
def test_lines_of_json_end_with_a_mark_and_name_their_text(tmp_path: Path, key: str):
    path = lines(tmp_path / "docs.jsonl", *({key: TEXT[:90], "id": n} for n in range(30)))
    data, notes = opened(path)
    assert (np.asarray(data.parts["train"][:200]) == 256).sum() == 2
    assert data.vocab_size == 257
    assert "model.vocab_size is 257, not 256" in notes[0]


def test_a_folder_of_texts_is_read_whole(tmp_path: Path):
    (tmp_path / "books" / "more").mkdir(parents=True)
    (tmp_path / "books" / "one.txt").write_text(TEXT)
    (tmp_path / "books" / "more" / "two.txt").write_text(TEXT)
    data, _ = opened(tmp_path / "books")
    assert sum(len(part) for part in data.parts.values()) == 2 * (len(TEXT) + 1)


def test_parquet_is_read(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"body": [TEXT[:90]] * 30, "stars": [1] * 30})
    parquet.write_table(table, tmp_path / "docs.parquet")
    assert opened(tmp_path / "docs.parquet")[0].vocab_size == 257


def test_conversations_are_read_as_conversations(tmp_path: Path):
    talks = [{"prompt": "2 + 2?", "completion": f" {n}."} for n in range(40)]
    path = lines(tmp_path / "talks.jsonl", *talks)
    found = own_data(str(path), load_config("bytes-nano"), {})
    assert (found.overrides["data.source"], found.overrides["model.vocab_size"]) == ("instructions", 257)


def test_what_tokenize_wrote_beside_a_file_is_read(tmp_path: Path):
    (tmp_path / "book.txt").write_text(TEXT)
    tokens = tmp_path / "book.bin"
    tokenize([str(tmp_path / "book.txt")], str(tokens), dtype="uint32", end_of_document="256")
    data, notes = opened(tokens)
    assert data.parts["train"].dtype == np.uint32
    assert "model.vocab_size is 257" in notes[0]
    said = ["data.source=tokens", f"data.path={tokens}", "model.vocab_size=257"]
    again = open_data(load_config("bytes-nano", said))
    assert isinstance(again, TokenWindows)
    assert again.parts["train"].dtype == np.uint32
    # And a text whose tokens lie beside it is not tokenized again.
    opened(tmp_path / "book.txt", **{"data.end_of_document": "256", "model.vocab_size": 257})
    assert not (tmp_path / "cache").exists()


def test_its_identity_is_that_of_the_texts(tmp_path: Path):
    (tmp_path / "book.txt").write_text(TEXT)
    run = load_config("bytes-nano", {"data.source": "text", "data.path": str(tmp_path / "book.txt")})
    identity = data_identity(run)
    assert identity is not None
    assert identity["num_bytes"] == len(TEXT)


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("bok.txt", "no such file or folder", "did you mean 'book.txt'?"),
        ("nowhere/book.txt", "no such file or folder", "exists"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, words: str, hint: str):
    (tmp_path / "book.txt").write_text(TEXT)
    with pytest.raises(InputError, match=words) as caught:
        opened(tmp_path / name)
    assert hint in caught.value.hint


def test_a_folder_of_texts_and_tokens_is_ambiguous(tmp_path: Path):
    (tmp_path / "book.txt").write_text(TEXT)
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "other.bin")
    with pytest.raises(InputError, match="holds token files") as caught:
        opened(tmp_path)
    assert "--data" in caught.value.hint


def test_the_name_of_a_file_does_not_say_what_it_holds(tmp_path: Path):
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "train.tok")
    assert isinstance(opened(tmp_path / "train.tok", **{"model.vocab_size": 3000})[0], TokenWindows)
    (tmp_path / "README").write_text(TEXT)
    assert opened(tmp_path / "README")[0].is_bytes
    np.save(tmp_path / "ids.npy", np.arange(600, dtype=np.uint16))
    with pytest.raises(InputError, match=r"NumPy's \.npy"):
        opened(tmp_path / "ids.npy")


def test_packed_texts_have_segments(tmp_path: Path):
    path = lines(tmp_path / "docs.jsonl", *({"text": TEXT[:40]} for _ in range(60)))
    data, _ = opened(path, **{"data.documents": "packed"})
    assert data.batch(0, "train")["segments"].max() > 0


# The widths of bare files: ids as they are drawn, the type that wrote them, the type that reads them.
IDS = np.random.default_rng(0).zipf(1.2, 4000) % 100_000
BELOW = IDS % 60_000
CASES = [
    (IDS, "<u4", "uint16", "every second id is 0 or 1.*4 bytes each", "uint32"),
    (BELOW, "<u4", "uint16", "every second id is 0.*4 bytes each", "uint32"),
    (BELOW % 65, "<u4", "uint16", "every second id is 0.*4 bytes each", "uint32"),
    (IDS * 9, "<u4", "uint16", "every second id is at most .*4 bytes each", "uint32"),
    (IDS, "<u8", "uint16", "8 bytes each", "astype"),
    (IDS, "<u8", "uint32", "8 bytes each", "astype"),
    (BELOW, "<u2", "uint32", "outside model.vocab_size", '"uint16"'),
    (BELOW, "<u2", "int32", "outside model.vocab_size", '"uint16"'),
    (BELOW, ">u4", "uint32", "outside model.vocab_size", "big-endian"),
]


@pytest.mark.parametrize(("ids", "written", "read", "words", "hint"), CASES)
def test_a_wrong_width_is_noticed(
    tmp_path: Path, ids: np.ndarray, written: str, read: str, words: str, hint: str
):
    ids.astype(written).tofile(tmp_path / "big.bin")
    said = ["data.source=tokens", f"data.path={tmp_path / 'big.bin'}", f"data.dtype={read}"]
    with pytest.raises(InputError, match=words) as caught:
        open_data(load_config("bytes-nano", [*said, "model.vocab_size=1000000"]))
    assert hint in caught.value.hint


@pytest.mark.parametrize(("ids", "dtype"), [(BELOW, "uint16"), (IDS, "uint32"), (BELOW % 4, "uint16")])
def test_the_right_width_is_found_and_accepted(tmp_path: Path, ids: np.ndarray, dtype: str):
    ids.astype(dtype).tofile(tmp_path / "big.bin")
    data, notes = opened(tmp_path / "big.bin", **{"model.vocab_size": 100_000})
    assert isinstance(data, TokenWindows)
    assert data.parts["train"].dtype == np.dtype(dtype)
    assert f"read as {dtype}" in notes[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.encode(), "it is text"),
        (b"\x93NUMPY" + bytes(300), "NumPy"),
        (b"PK\x03\x04" + bytes(300), "zip archive"),
        (b"\x1f\x8b" + bytes(300), "gzip"),
    ],
)
def test_what_is_no_token_file_is_refused(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "x.bin").write_bytes(content)
    said = ["data.source=tokens", f"data.path={tmp_path / 'x.bin'}", "data.dtype=uint16"]
    with pytest.raises(InputError, match=words):
        open_data(load_config("bytes-nano", [*said, "model.vocab_size=60000"]))
