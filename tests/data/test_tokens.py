"""Token files, their metadata and identity; windows of tokens, documents in them, Python's own sources."""

import dataclasses
import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.contrib.texts import TokenFileMetadata, metadata_path, read_metadata
from meshwright.errors import InputError
from meshwright.trainer.data import (
    RandomTokens,
    TokenWindows,
    data_identity,
    identity_difference,
    open_data,
    stdlib_parts,
)


def open_file(path: Path, dtype: str = "uint16", *overrides: str) -> TokenWindows:
    data = ["data.source=tokens", f"data.path={path}", f"data.dtype={dtype}"]
    batch = ["batch.sequences=4", "batch.sequence_length=8", "model.vocab_size=1000"]
    opened = open_data(load_config("bytes-nano", [*data, *batch, *overrides]))
    assert isinstance(opened, TokenWindows)
    return opened


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32"])
def test_batches_are_windows_of_the_file(tmp_path: Path, dtype: str):
    np.arange(1000, dtype=dtype).tofile(tmp_path / "tokens.bin")
    data = open_file(tmp_path / "tokens.bin", dtype)
    seen = {"train": set[int](), "held-out": set[int]()}
    for step in range(200):
        for split, tokens_seen in seen.items():
            tokens = data.batch(step, split)["tokens"]  # pyright: ignore
            assert tokens.shape == (4, 9)
            assert tokens.dtype == np.int32
            assert (np.diff(tokens, axis=1) == 1).all()
            tokens_seen |= set(tokens.flatten().tolist())
    assert max(seen["train"]) < 950  # 5 % of 1000 are held out, at the end
    assert len(seen["train"]) > 900
    assert (min(seen["held-out"]), max(seen["held-out"])) == (950, 999)


def test_a_batch_is_a_function_of_seed_and_step(tmp_path: Path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    first, again = open_file(tmp_path / "tokens.bin"), open_file(tmp_path / "tokens.bin")
    other = open_file(tmp_path / "tokens.bin", "uint16", "seed=7")
    again.batch(0, "train")
    assert np.array_equal(first.batch(9, "train")["tokens"], again.batch(9, "train")["tokens"])
    assert not np.array_equal(first.batch(9, "train")["tokens"], other.batch(9, "train")["tokens"])


def test_a_file_of_exactly_two_windows_serves(tmp_path: Path):
    np.arange(18, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    data = open_file(tmp_path / "tokens.bin", "uint16", "data.held_out_fraction=0.5")
    assert data.batch(0, "train")["tokens"].tolist() == [list(range(9))] * 4
    assert data.batch(0, "held-out")["tokens"].tolist() == [list(range(9, 18))] * 4


def test_the_unigram_entropy_is_that_of_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokens = np.array([0] * 50 + [1] * 25 + [2] * 25 + [0] * 100, np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    data = open_file(tmp_path / "tokens.bin", "uint16", "data.held_out_fraction=0.5")
    by_hand = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert data.unigram_entropy_nats("train") == pytest.approx(by_hand)
    assert data.unigram_entropy_nats("held-out") == 0.0
    monkeypatch.setattr("meshwright.trainer.data._tokens._TOKENS_COUNTED_AT_ONCE", 7)
    assert data.unigram_entropy_nats("train") == pytest.approx(by_hand)


def test_the_tokens_of_a_file_decode_to_their_ids(tmp_path: Path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    assert open_file(tmp_path / "tokens.bin").decode(np.array([5, 6])) == "5 6"


@pytest.mark.parametrize(
    ("dtype", "token", "message", "hint"),
    [
        (
            "uint16",
            1000,
            "holds token 1000, outside model.vocab_size = 1000",
            "at least model.vocab_size = 1001",
        ),
        ("uint32", 2**31 + 5, "holds token 2147483653, outside", "or check data.dtype"),
        ("int32", -1, "holds token -1; token ids are not negative", "as uint32 these bytes are 4294967295"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused(
    tmp_path: Path, dtype: str, token: int, message: str, hint: str
):
    path = tmp_path / "tokens.bin"
    np.full(1000, token, dtype).tofile(path)
    data = open_file(path, dtype)
    for use in (lambda: data.batch(0, "train"), lambda: data.unigram_entropy_nats("train")):
        with pytest.raises(InputError) as caught:
            use()
        assert f"{path} {message}" in caught.value.message
        assert hint in caught.value.hint


def test_a_process_reads_the_windows_of_its_rows_alone(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(path)
    whole = open_file(path, "uint16", "data.order=epochs").batch(7, "train")["tokens"]
    tokens[whole[2, 4]] = 1000  # outside the vocabulary
    tokens.tofile(path)
    data = open_file(path, "uint16", "data.order=epochs")
    rows = np.array([0, 1, 3])
    assert np.array_equal(data.batch(7, "train", rows)["tokens"], whole[rows])
    with pytest.raises(InputError):
        data.batch(7, "train", np.array([2]))


@pytest.mark.parametrize(
    ("content", "dtype", "message", "hint"),
    [
        (None, "uint16", "no token file", "exists"),
        (b"", "uint16", "is empty", "write tokens to it as uint16"),
        (b"x" * 101, "uint16", "101 bytes are no whole number of uint16 tokens", "cut short"),
        (b"x" * 102, "int32", "102 bytes are no whole number of int32 tokens", "data.dtype may be uint16"),
        (
            b"xx" * 10,
            "uint16",
            "the train part has 9 tokens, and a window needs 10",
            "longer data, at least 20 tokens",
        ),
        (
            b"xx" * 60,
            "uint16",
            "the held-out part has 3 tokens, and a window",
            "use data.held_out_fraction = 0.167, or batch.sequence_length = 2",
        ),
    ],
)
def test_a_file_that_cannot_serve_is_refused(
    tmp_path: Path, content: bytes | None, dtype: str, message: str, hint: str
):
    path = tmp_path / "tokens.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        open_file(path, dtype, "batch.sequence_length=9")
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert hint in caught.value.hint


def test_random_tokens_fill_the_vocabulary_evenly():
    config = load_config("bytes-nano", ["data.source=synthetic", "model.vocab_size=16"])
    data = open_data(config)
    assert isinstance(data, RandomTokens)
    tokens = np.concatenate([data.batch(step, "train")["tokens"] for step in range(20)])
    assert tokens.dtype == np.int32
    assert tokens.shape == (160, 65)
    assert np.bincount(tokens.flatten(), minlength=16) / tokens.size == pytest.approx(1 / 16, rel=0.2)
    assert data.unigram_entropy_nats("train") == pytest.approx(math.log(16))
    assert data.decode(np.array([3, 1])) == "3 1"
    assert not np.array_equal(data.batch(0, "train")["tokens"], data.batch(0, "held-out")["tokens"])


def windows_of(data: TokenWindows, steps: range) -> np.ndarray:
    """Which window each row of each step is; the file counts upward."""
    firsts = np.concatenate([data.batch(step, "train")["tokens"][:, 0] for step in steps])
    assert not (firsts % 8).any()
    return firsts // 8


def test_an_epoch_holds_each_window_once_and_the_next_has_another_order(tmp_path: Path):
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    data = open_file(tmp_path / "tokens.bin", "uint16", "data.order=epochs", "model.vocab_size=20000")
    assert data.num_windows("train") == (19_000 - 1) // 8
    count = data.num_windows("train")
    seen = windows_of(data, range(-(-3 * count // 4)))  # rows of one step may be of two epochs
    for epoch in range(3):
        assert np.array_equal(np.sort(seen[epoch * count : (epoch + 1) * count]), np.arange(count))
    assert (seen[:count] == seen[count : 2 * count]).mean() < 0.01


def test_the_place_in_an_epoch_is_a_function_of_the_step_whatever_the_rows_of_a_batch(tmp_path: Path):
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    overrides = ("data.order=epochs", "model.vocab_size=20000")
    four = open_file(tmp_path / "tokens.bin", "uint16", *overrides)
    eight = open_file(tmp_path / "tokens.bin", "uint16", *overrides, "batch.sequences=8")
    assert np.array_equal(windows_of(four, range(1000, 1002)), windows_of(eight, range(500, 501)))
    # Straight to a step a billion on: nothing before it is computed.
    assert four.batch(10**9, "train")["tokens"].shape == (4, 9)


def test_every_token_but_the_first_is_predicted_once_per_epoch(tmp_path: Path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    data = open_file(tmp_path / "tokens.bin", "uint16", "data.order=epochs", "batch.sequences=1")
    steps = range(data.num_windows("train"))
    targets = np.concatenate([data.batch(step, "train")["tokens"][0, 1:] for step in steps])
    left_over = (950 - 1) % 8
    assert np.array_equal(np.sort(targets), np.arange(1, 950 - left_over))


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_packed_documents_come_with_their_segments(tmp_path: Path, order: str):
    np.resize(np.array([5, 6, 7, 999, 8, 999], np.uint16), 1000).tofile(tmp_path / "tokens.bin")
    packed = ("data.documents=packed", "data.end_of_document=999", f"data.order={order}")
    batch = open_file(tmp_path / "tokens.bin", "uint16", *packed).batch(3, "train")
    assert batch["segments"].dtype == np.int32
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        number = 0
        for token, segment in zip(tokens, segments, strict=True):
            assert segment == number
            number += token == 999


def test_an_end_of_document_outside_the_vocabulary_is_refused(tmp_path: Path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    packed = ("data.documents=packed", "data.end_of_document=1000")
    with pytest.raises(
        InputError, match=r"end_of_document = 1000 is outside model\.vocab_size = 1000"
    ) as caught:
        open_file(tmp_path / "tokens.bin", "uint16", *packed)
    assert "model.vocab_size = 1001" in caught.value.hint


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_in_words(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.arange(10_000, dtype=np.uint16).tofile(path)
    data = open_file(path, "uint16", "model.vocab_size=10000")
    data.batch(0, "train")
    os.truncate(path, 100)
    for use in (lambda: data.batch(1, "train"), lambda: data.unigram_entropy_nats("held-out")):
        with pytest.raises(InputError) as caught:
            use()
        assert f"{path} was cut short while it was read: it has 100 bytes, and had" in caught.value.message
        assert "--resume" in caught.value.hint


def test_a_file_that_is_replaced_while_it_is_read_stays_the_one_that_was_opened(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    data = open_file(path)
    before = data.batch(5, "train")["tokens"]
    np.zeros(20, np.uint16).tofile(tmp_path / "other.bin")
    (tmp_path / "other.bin").replace(path)
    assert np.array_equal(data.batch(5, "train")["tokens"], before)


def test_a_file_is_told_from_another_by_size_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tokens.bin"
    config = load_config("bytes-nano", ["data.source=tokens", f"data.path={path}", "data.dtype=uint16"])

    def identity(tokens: np.ndarray) -> dict[str, object]:
        tokens.tofile(path)
        found = data_identity(config)
        assert found is not None
        return found

    tokens = np.arange(1000, dtype=np.uint16)
    known = identity(tokens)
    assert (known["num_bytes"], known["hashed"]) == (2000, "whole")
    assert identity_difference(known, identity(tokens)) == ""
    assert identity_difference(known, identity(tokens[:900])) == "it has 1800 bytes, and had 2000"
    assert "2000 bytes are as many as before, and not the same" in identity_difference(
        known, identity(tokens + 1)
    )
    monkeypatch.setattr(
        "meshwright.trainer.data._identity.BLOCK_BYTES", 8
    )  # the first and last among 64 blocks
    sampled = identity(tokens)
    assert sampled["hashed"] == "64 blocks of 8 bytes"
    for place in (0, -1):
        changed = tokens.copy()
        changed[place] += 1
        assert identity_difference(sampled, identity(changed))


@pytest.mark.parametrize("overrides", [["data.source=synthetic"], ["data.source=python-stdlib"]])
def test_data_that_is_in_no_named_file_has_an_identity_where_it_is_read_from_a_disk(overrides: list[str]):
    found = data_identity(load_config("bytes-nano", overrides))
    assert (found is None) == ("synthetic" in overrides[0])
    assert found == data_identity(load_config("bytes-nano", overrides))


@pytest.mark.parametrize("documents", [[1, 2, 9, 3, 9, 9, 4], [9, 1, 1, 1, 1, 1, 9], [1] * 7])
def test_a_document_ends_with_its_end(tmp_path: Path, documents: list[int]):
    np.array(documents * 40, np.uint16).tofile(tmp_path / "tokens.bin")
    packed = ("data.documents=packed", "data.end_of_document=9")
    batch = open_file(tmp_path / "tokens.bin", "uint16", *packed).batch(0, "train")
    by_hand = [[row[:place].count(9) for place in range(9)] for row in batch["tokens"].tolist()]
    assert batch["segments"].tolist() == by_hand
    assert batch["segments"].dtype == np.int32


FACTS = TokenFileMetadata(
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


def opened(path: Path, *overrides: str, facts: TokenFileMetadata | str = FACTS):
    np.resize(np.array([104, 105, 256], np.uint16), 1000).tofile(path)
    metadata_path(path).write_text(facts if isinstance(facts, str) else facts.as_json())
    said = ["data.source=tokens", f"data.path={path}", "data.dtype=uint16", "batch.sequence_length=8"]
    return open_data(load_config("bytes-nano", [*said, "model.vocab_size=257", *overrides]))


def test_what_is_written_is_read(tmp_path: Path):
    metadata_path(tmp_path / "a.bin").write_text(FACTS.as_json())
    assert read_metadata(tmp_path / "a.bin") == FACTS
    assert (tmp_path / "a.bin.json").is_file()
    assert read_metadata(tmp_path / "b.bin") is None


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
        (
            [],
            {"dtype": "nope"},
            "a.bin.json: dtype = 'nope' is no type of token ids",
            "uint16, int32, uint32",
        ),
        ([], {"dtype": "("}, "a.bin.json: dtype = '(' is no type of token ids", "uint16, int32, uint32"),
        ([], {"num_tokens": 10**200}, "a.bin.json: num_tokens = 1000000000", "make the tokens again"),
        ([], {"vocab_size": -5}, "a.bin.json: vocab_size = -5 cannot be", "make the tokens again"),
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
    [("{", "not JSON: Expecting"), ("[]", "the whole"), ('{"schema": 1}', "tokenizer: Field required")],
)
def test_facts_that_are_none_are_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(InputError, match=r"a\.bin\.json does not describe a token file") as caught:
        opened(tmp_path / "a.bin", facts=text)
    assert message in caught.value.message


def test_facts_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object):
        raise PermissionError(13, "Permission denied")

    metadata_path(tmp_path / "a.bin").write_text(FACTS.as_json())
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=r"cannot read .*Permission denied"):
        read_metadata(tmp_path / "a.bin")


def make_stdlib(folder: Path, num_files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(num_files):
        (folder / f"m{number:03}.py").write_bytes(b"%03d\xff" % number)
    for outside in ("site-packages/other.py", "test/test_m.py", "pkg/tests/test_n.py", "pkg/notes.txt"):
        (folder / outside).parent.mkdir(parents=True, exist_ok=True)
        (folder / outside).write_text("not these")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder) if name == "stdlib" else None)
    stdlib_parts.cache_clear()


def test_every_twentieth_file_is_held_out_and_no_byte_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_stdlib(tmp_path, 41, monkeypatch)
    parts = stdlib_parts(0.05)
    stdlib_parts.cache_clear()
    assert parts["held-out"].tobytes() == b"019\xff039\xff"
    assert parts["train"].tobytes() == b"".join(b"%03d\xff" % n for n in range(41) if n not in (19, 39))
    assert parts["train"].dtype == np.uint8


def test_an_interpreter_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_stdlib(tmp_path, 19, monkeypatch)
    with pytest.raises(InputError, match=r"has 19 Python sources, and .* = 0.05 needs at least 20") as caught:
        stdlib_parts(0.05)
    assert "a Python with its sources on disk" in caught.value.hint


def test_this_interpreter_s_library_reads_as_python_text():
    data = open_data(load_config("bytes-nano"))
    assert isinstance(data, TokenWindows)
    text = "".join(data.decode(row) for step in range(40) for row in data.batch(step, "train")["tokens"])
    assert "self" in text
    assert "import" in text
    assert 2.5 < data.unigram_entropy_nats("held-out") < 4.0  # English is 2.9 to 3.1; a uniform byte 5.5
    assert open_data(load_config("bytes-nano", ["seed=1"])).parts["train"] is data.parts["train"]  # pyright: ignore


def test_bytes_that_are_no_text_are_shown_as_such():
    data = open_data(load_config("bytes-nano"))
    assert isinstance(data, TokenWindows)
    assert data.decode(np.frombuffer("naïve".encode(), np.uint8)) == "naïve"
    assert data.decode(np.array([65, 255], np.int32)) == "A\N{REPLACEMENT CHARACTER}"
