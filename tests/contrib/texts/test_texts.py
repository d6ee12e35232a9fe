"""Texts to tokenize, and tokenizers."""

import builtins
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.contrib.texts import fragments_in, open_tokenizer, pieces_of
from meshwright.errors import InputError
from meshwright.extras import how_to_install
from meshwright.trainer.data import ByteTokenizer


def documents(path: Path, piece_bytes: int = 1 << 20, key: str = "text") -> list[str]:
    pieces = pieces_of([str(path)], piece_bytes)
    return [text for piece in pieces for text, _ in fragments_in(piece, key, ByteTokenizer())]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=12),
    piece_bytes=st.integers(1, 60),
    ends=st.booleans(),
    ascii_only=st.booleans(),
)
def test_every_document_is_read_once_however_a_file_is_shared_out(
    tmp_path: Path, texts: list[str], piece_bytes: int, ends: bool, ascii_only: bool
):
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_only) for text in texts]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(lines) + ("\n" if ends else ""), encoding="utf-8")
    assert documents(path, piece_bytes) == texts


def test_any_other_file_is_one_document_as_it_is(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b'{"text": 1}\r\n\n')
    assert documents(tmp_path / "a.txt", 3) == ['{"text": 1}\r\n\n']


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b'{"text": "a"}\n\n{"text": \n', "a.jsonl:3: not JSON: ", "correct the line"),
        (b'{"text": "a"}\n[1]\n', "a.jsonl:2: a list, not an object", "--text-key names another"),
        (b'{"texts": "a"}\n', "a.jsonl:1: no key 'text'", "did you mean 'texts'?"),
        (b'\n{"text": 5}\n', "a.jsonl:2: 'text' is 5, not text", "--text-key"),
        (b'{"text": "\\ud800"}', "a.jsonl:1: 'text' has half of a pair, \\ud800", "correct the line"),
        (b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl: byte 24 (0xff) is not UTF-8", "iconv"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [6, 1 << 20])
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, message: str, hint: str, piece_bytes: int):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError) as caught:
        documents(tmp_path / "a.jsonl", piece_bytes)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"abc\xe9t\xe9", "a.txt: byte 3 (0xe9) is not UTF-8", "iconv"),
        (b"\x1f\x8b\x08", "a.txt: byte 1 (0x8b) is not UTF-8", "compressed by gzip; unpack it"),
        (b"\x28\xb5\x2f\xfd", "a.txt: byte 1 (0xb5) is not UTF-8", "compressed by zstd"),
    ],
)
def test_a_text_that_is_no_utf_8_is_refused(tmp_path: Path, content: bytes, message: str, hint: str):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(InputError) as caught:
        documents(tmp_path / "a.txt")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_inputs_that_cannot_serve_are_refused(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("a")
    cases = [
        ([], "no text was named"),
        ([str(tmp_path)], "empty.txt is empty"),
        ([str(tmp_path / "b.txt")], "no text .*b.txt"),
        ([str(tmp_path / "empty.txt")], "empty.txt is empty"),
        ([str(tmp_path / "a.txt"), f"{tmp_path}/./a.txt"], "is named twice"),
    ]
    for inputs, message in cases:
        with pytest.raises(InputError, match=message):
            pieces_of(inputs, 10)


def test_a_text_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=r"cannot read .*a\.txt: Permission denied"):
        documents(tmp_path / "a.txt")


WORDS = {"<end>": 0, "[CLS]": 1, "a": 2, "b": 3, "[UNK]": 4, "far": 9}


@pytest.fixture
def words(tmp_path: Path) -> str:
    """Words apart by blanks; set to put [CLS] in front, cut to three ids and pad to five."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    made.add_special_tokens(["<end>"])
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_bytes_are_those_of_utf_8():
    tokenizer = open_tokenizer("bytes")
    assert [ids.tolist() for ids in tokenizer.encode(["é€", "", "a\n"])] == [
        [0xC3, 0xA9, 0xE2, 0x82, 0xAC],
        [],
        [97, 10],
    ]
    assert (tokenizer.num_ids, tokenizer.sha256, tokenizer.end_of_document("256")) == (256, None, 256)


def test_ids_become_text_again(words: str):
    ids = np.array([0x61, 0xC3, 0xA9, 256, 0xFF], np.int32)
    assert open_tokenizer("bytes").decode(ids) == "aé\N{REPLACEMENT CHARACTER}"
    assert open_tokenizer(words).decode(np.array([2, 9, 0, 7])) == "a far <end>"


def test_only_256_may_end_a_document_of_bytes():
    with pytest.raises(InputError, match="with bytes only 256 is free"):
        open_tokenizer("bytes").end_of_document("10")


def test_a_file_gives_the_ids_of_the_text_and_no_more(words: str):
    tokenizer = open_tokenizer(words)
    assert [ids.tolist() for ids in tokenizer.encode(["a b a far", "x", ""])] == [[2, 3, 2, 9], [4], []]
    assert tokenizer.num_ids == 10  # the largest id and one, though there are only six
    assert tokenizer.sha256 == hashlib.sha256(Path(words).read_bytes()).hexdigest()
    assert tokenizer.name == "tokenizer.json"


def test_a_document_ends_with_a_token_or_its_id(words: str):
    tokenizer = open_tokenizer(words)
    assert (tokenizer.end_of_document("<end>"), tokenizer.end_of_document("9")) == (0, 9)
    for asked in ("<emd>", "10"):
        with pytest.raises(InputError, match="has no such token and 10 ids") as caught:
            tokenizer.end_of_document(asked)
        assert "'<end>'" in caught.value.hint or "<end>" in caught.value.hint


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(InputError, match="is not a tokenizer"):
        open_tokenizer(str(tmp_path / "t.json"))


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match="no tokenizer 'gpt2'") as caught:
        open_tokenizer("gpt2")
    assert "local tokenizer.json" in caught.value.hint


def test_without_the_package_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = builtins.__import__

    def without(name: str, *rest, **named):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest, **named)

    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="needs the package tokenizers, which is not installed") as caught:
        open_tokenizer(str(tmp_path / "t.json"))
    assert how_to_install("tokenizers") in caught.value.hint


def test_a_long_text_of_bytes_is_read_in_blocks_of_whole_characters(tmp_path: Path, monkeypatch):
    text = "aé\u2028\U0001f600" * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (piece,) = pieces_of([str(tmp_path / "a.txt")], 10)
    for block_bytes in (4, 5, 7, 64):
        monkeypatch.setattr("meshwright.contrib.texts._texts._BLOCK_BYTES", block_bytes)
        fragments = list(fragments_in(piece, "text", ByteTokenizer()))
        assert "".join(part for part, _ in fragments) == text
        assert [is_end for _, is_end in fragments] == [False] * (len(fragments) - 1) + [True]
    (tmp_path / "a.txt").write_bytes(text.encode()[:-1])
    (piece,) = pieces_of([str(tmp_path / "a.txt")], 10)
    with pytest.raises(InputError, match=r"byte 496 \(0xf0\) is not UTF-8"):
        list(fragments_in(piece, "text", ByteTokenizer()))


@pytest.mark.parametrize("kind", ["bytes and words", "words", "one word"])
def test_a_long_text_is_divided_where_its_ids_are_those_of_the_whole(tmp_path: Path, monkeypatch, kind: str):
    """SentencePiece's way puts a space in front of each text, so that none can be divided."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    pre = tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.pre_tokenizer = {
        "bytes and words": pre.ByteLevel(add_prefix_space=False), "words": pre.Whitespace(),
        "one word": pre.Metaspace(split=False),
    }[kind]  # fmt: skip
    text = "".join(f"one, twö  three\n\n{number} four's\tfive " for number in range(400))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["?"], show_progress=False)
    made.train_from_iterator([text], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (piece,) = pieces_of([str(tmp_path / "a.txt")], 10)
    opened = open_tokenizer(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("meshwright.contrib.texts._texts._BLOCK_BYTES", 1000)
    monkeypatch.setattr("meshwright.contrib.texts._texts._CONTEXT", 40)
    fragments = [part for part, _ in fragments_in(piece, "text", opened)]
    assert "".join(fragments) == text
    assert (len(fragments) > 10) == (kind != "one word")
    assert np.array_equal(np.concatenate(opened.encode(fragments)), opened.encode([text])[0])
