import dataclasses
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.data import TokenFileFacts, open_data, read_facts
from meshwright.data._token_files import facts_path
from meshwright.errors import InputError

FACTS = TokenFileFacts(
    schema=1,
    tokenizer="bytes",
    tokenizer_sha256=None,
    dtype="uint16",
    vocab_size=257,
    end_of_document=256,
    num_tokens=1000,
    num_documents=3,
    inputs=(),
)


def opened(path: Path, *overrides: str, facts: TokenFileFacts | str = FACTS):
    np.resize(np.array([104, 105, 256], np.uint16), 1000).tofile(path)
    facts_path(path).write_text(facts if isinstance(facts, str) else facts.as_json())
    said = ["data.source=tokens", f"data.path={path}", "data.dtype=uint16", "batch.sequence_length=8"]
    return open_data(load_config("bytes-nano", [*said, "model.vocab_size=257", *overrides]))


def test_what_is_written_is_read(tmp_path: Path):
    facts_path(tmp_path / "a.bin").write_text(FACTS.as_json())
    assert read_facts(tmp_path / "a.bin") == FACTS
    assert (tmp_path / "a.bin.json").is_file()
    assert read_facts(tmp_path / "b.bin") is None


def test_bytes_are_shown_as_text_without_the_ends_of_documents(tmp_path: Path):
    data = opened(tmp_path / "a.bin")
    assert data.decode(np.array([104, 105, 256, 104])) == "hih"  # pyright: ignore
    other = opened(tmp_path / "b.bin", facts=dataclasses.replace(FACTS, tokenizer="t.json"))
    assert other.decode(np.array([104, 256])) == "104 256"  # pyright: ignore


@pytest.mark.parametrize(
    ("overrides", "changed", "message", "hint"),
    [
        (["data.dtype=int32"], {}, "data.dtype = 'int32', but", "use data.dtype = 'uint16'"),
        (["model.vocab_size=256"], {}, "may hold ids below 257", "model.vocab_size = 257"),
        ([], {"num_tokens": 1001}, "has 2000 bytes, and a.bin.json says 1001 tokens", "copy both again"),
        (
            ["data.documents=packed", "data.end_of_document=10"],
            {},
            "data.end_of_document = 10, but in",
            "use data.end_of_document = 256",
        ),
        (
            ["data.documents=packed", "data.end_of_document=10"],
            {"end_of_document": None},
            "no document has an end",
            "make the tokens with --end-of-document",
        ),
        ([], {"schema": 2}, "has schema 2, and this release reads 1", "remove a.bin.json"),
    ],
)
def test_a_configuration_that_does_not_match_the_file_is_refused(
    tmp_path: Path, overrides: list[str], changed: dict, message: str, hint: str
):
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "a.bin", *overrides, facts=dataclasses.replace(FACTS, **changed))
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "Invalid JSON"), ("[]", "the whole"), ('{"schema": 1}', "tokenizer: Field required")],
)
def test_facts_that_are_none_are_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(InputError, match=r"a\.bin\.json does not describe a token file") as caught:
        opened(tmp_path / "a.bin", facts=text)
    assert message in caught.value.message


def test_facts_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path):
        raise PermissionError(13, "Permission denied")

    facts_path(tmp_path / "a.bin").write_text(FACTS.as_json())
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"cannot read .*Permission denied"):
        read_facts(tmp_path / "a.bin")
