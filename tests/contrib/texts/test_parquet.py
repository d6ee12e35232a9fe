"""Texts in Parquet files and in folders."""

import builtins
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from meshwright.contrib.texts import tokenize
from meshwright.errors import InputError
from meshwright.extras import how_to_install

pytestmark = pytest.mark.once

TEXTS = [f"text {number} " + "é" * (number % 5) for number in range(40)]


def documents(path: Path, piece_bytes: int = 1 << 20, key: str = "text") -> list[str]:
    with TemporaryDirectory() as folder:
        to = f"{folder}/tokens.bin"
        tokenize([str(path)], to, end_of_document="256", text_key=key, piece_bytes=piece_bytes)
        ids = np.fromfile(to, "<u2")
    *read, rest = np.split(ids, np.flatnonzero(ids == 256) + 1)
    assert not rest.size
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in read]


def write(path: Path, texts: list, **options):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    kind = options.pop("kind", arrow.string())
    table = arrow.table({"id": list(range(len(texts))), "text": arrow.array(texts, kind)})
    parquet.write_table(table, path, **options)


@pytest.mark.parametrize("piece_bytes", [20, 300, 1 << 20])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_every_row_is_a_document_however_a_file_is_shared_out(tmp_path: Path, piece_bytes: int, rows: int):
    write(tmp_path / "a.parquet", TEXTS, row_group_size=rows)
    assert documents(tmp_path / "a.parquet", piece_bytes) == TEXTS


@pytest.mark.parametrize("form", ["large", "dictionary", "zstd"])
def test_texts_are_read_as_they_are_stored(tmp_path: Path, form: str):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    kinds = {"large": arrow.large_string(), "dictionary": arrow.dictionary(arrow.int32(), arrow.string())}
    options = {"compression": "zstd"} if form == "zstd" else {"kind": kinds[form]}
    write(tmp_path / "a.parquet", TEXTS, **options)
    assert documents(tmp_path / "a.parquet") == TEXTS


def test_a_folder_stands_for_the_texts_in_and_below_it(tmp_path: Path):
    folder = tmp_path / "texts"
    (folder / "c").mkdir(parents=True)
    write(folder / "b.parquet", ["from b"])
    (folder / "a.jsonl").write_text(json.dumps({"text": "from a"}))
    (folder / "c" / "d.txt").write_text("from d")
    (folder / "c" / "e.ndjson").write_text(json.dumps({"text": "from e"}))
    (folder / "README.md").write_text("not a text")
    assert documents(folder) == ["from a", "from b", "from d", "from e"]
    made = tokenize([str(folder)], str(tmp_path / "tokens.bin"), end_of_document="256", workers=2)
    assert [Path(each.path).name for each in made.inputs] == ["a.jsonl", "b.parquet", "d.txt", "e.ndjson"]
    ids = np.fromfile(tmp_path / "tokens.bin", "<u2")
    assert bytes(ids[ids < 256].astype(np.uint8)) == b"from afrom bfrom dfrom e"


def test_a_folder_without_texts_and_a_file_named_twice_are_refused(tmp_path: Path):
    (tmp_path / "README.md").write_text("not a text")
    with pytest.raises(InputError, match=r"is a folder without a file that ends in \.jsonl, \.ndjson, "):
        documents(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="is named twice"):
        tokenize([str(tmp_path), str(tmp_path / "a.txt")], str(tmp_path / "tokens.bin"))


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("texts", "a.parquet: no column 'texts'", "did you mean 'text'?"),
        ("id", "a.parquet: column 'id' holds int64, not text", "--text-key names the column"),
    ],
)
def test_a_column_that_is_not_there_or_no_text_is_refused(tmp_path: Path, key: str, message: str, hint: str):
    write(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(InputError) as caught:
        documents(tmp_path / "a.parquet", key=key)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_row_without_a_text_is_named(tmp_path: Path):
    write(tmp_path / "a.parquet", ["a", "b", "c", None], row_group_size=2)
    with pytest.raises(InputError, match=r"a\.parquet: row 3 has no 'text'"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("keep", [10, -1, -200])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, keep: int):
    write(tmp_path / "a.parquet", TEXTS)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:keep])
    with pytest.raises(InputError, match=r"a\.parquet is no whole Parquet file"):
        documents(tmp_path / "a.parquet")


def test_a_damaged_page_is_refused(tmp_path: Path):
    write(tmp_path / "a.parquet", TEXTS, compression="gzip", use_dictionary=False)
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = len(raw) // 3
    raw[middle : middle + 40] = b"\xff" * 40
    (tmp_path / "a.parquet").write_bytes(raw)
    with pytest.raises(InputError, match=r"a\.parquet is no whole Parquet file"):
        documents(tmp_path / "a.parquet")


def test_without_pyarrow_the_words_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # pyright: ignore

    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="needs the package pyarrow") as caught:
        documents(tmp_path / "a.parquet")
    assert how_to_install("parquet") in caught.value.hint


def test_a_column_named_twice_is_refused(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: 2 columns are called 'text'"):
        documents(tmp_path / "a.parquet")
