import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data._texts import documents_in, pieces_of
from meshwright.errors import InputError


def documents(path: Path, piece_bytes: int = 1 << 20, key: str = "text") -> list[str]:
    return [text for piece in pieces_of([str(path)], piece_bytes) for text in documents_in(piece, key)]


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
        (b'{"text": "a"}\n\n{"text": \n', "a.jsonl:3: no JSON: ", "mend the line"),
        (b'{"text": "a"}\n[1]\n', "a.jsonl:2: a list, no object", "--text-key names another"),
        (b'{"texts": "a"}\n', "a.jsonl:1: no key 'text'", "did you mean 'texts'?"),
        (b'\n{"text": 5}\n', "a.jsonl:2: 'text' is 5, no text", "--text-key"),
        (b'{"text": "\\ud800"}', "a.jsonl:1: 'text' has half of a pair, \\ud800", "mend the line"),
        (b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl: byte 24 (0xff) is no UTF-8", "iconv"),
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
        (b"abc\xe9t\xe9", "a.txt: byte 3 (0xe9) is no UTF-8", "iconv"),
        (b"\x1f\x8b\x08", "a.txt: byte 1 (0x8b) is no UTF-8", "compressed by gzip; unpack it"),
        (b"\x28\xb5\x2f\xfd", "a.txt: byte 1 (0xb5) is no UTF-8", "compressed by zstd"),
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
        ([str(tmp_path)], "is a folder"),
        ([str(tmp_path / "b.txt")], "no text .*b.txt"),
        ([str(tmp_path / "empty.txt")], "empty.txt is empty"),
        ([str(tmp_path / "a.txt"), f"{tmp_path}/./a.txt"], "is named twice"),
    ]
    for inputs, message in cases:
        with pytest.raises(InputError, match=message):
            pieces_of(inputs, 10)


def test_a_text_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"cannot read .*a\.txt: Permission denied"):
        documents(tmp_path / "a.txt")
