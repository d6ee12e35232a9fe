"""Token files of other programs, written here byte by byte from their descriptions, and what is refused."""

import struct
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.errors import InputError
from meshwright.trainer.data import TokenWindows, data_identity, open_data

DOCUMENTS = [list(range(100 * n, 100 * n + 20 + n)) for n in range(10)]  # 20 to 29 tokens each: 245
TOKENS = [token for document in DOCUMENTS for token in document]


def write_megatron(prefix: Path, documents=DOCUMENTS, *, code=4, letter="i", **wrong) -> None:
    """Write one sequence per document; `wrong` replaces parts of the index."""
    ids = b"".join(struct.pack(f"<{len(each)}{letter}", *each) for each in documents)
    size, begins = struct.calcsize(letter), [0]
    for each in documents:
        begins.append(begins[-1] + size * len(each))
    index = wrong.get("magic", b"MMIDIDX\x00\x00") + wrong.get("version", 1).to_bytes(8, "little")
    index += bytes([code]) + len(documents).to_bytes(8, "little")
    starts = wrong.get("starts", list(range(len(documents) + 1)))
    index += len(starts).to_bytes(8, "little")
    index += b"".join(len(each).to_bytes(4, "little") for each in documents)
    index += b"".join(each.to_bytes(8, "little") for each in wrong.get("begins", begins[:-1]))
    index += b"".join(each.to_bytes(8, "little") for each in starts)
    prefix.with_suffix(".bin").write_bytes(ids[: wrong.get("keep", len(ids))])
    prefix.with_suffix(".idx").write_bytes(index + wrong.get("more", b""))


def write_llm_c(path: Path, tokens=TOKENS, *, magic=20240520, version=1, count=None, letter="H") -> None:
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    path.write_bytes(header.ljust(1024, b"\0") + struct.pack(f"<{len(tokens)}{letter}", *tokens))


def write_datatrove(path: Path, documents=DOCUMENTS, *, letter="H", ends=None, metadata=None) -> None:
    tokens = [token for each in documents for token in each]
    path.write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    if ends is None:
        ends = np.cumsum([len(each) for each in documents]).tolist()
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata is not None:
        Path(f"{path}.metadata").write_text(metadata)


def config_of(path: Path, form: str, *more: str):
    said = ["data.source=tokens", f"data.path={path}", f"data.format={form}", "data.held_out_fraction=0.2"]
    batch = ["batch.sequences=4", "batch.sequence_length=8", "model.vocab_size=1000", "data.order=epochs"]
    typed = ["data.dtype=uint16"] if form in ("raw", "datatrove") else []
    return load_config("bytes-nano", [*said, *batch, *typed, *more])


def opened(path: Path, form: str, *more: str) -> TokenWindows:
    data = open_data(config_of(path, form, *more))
    assert isinstance(data, TokenWindows)
    return data


def refused(path: Path, form: str, *more: str) -> InputError:
    with pytest.raises(InputError) as caught:
        opened(path, form, *more)
    return caught.value


def all_tokens(data: TokenWindows) -> list[int]:
    return [token for split in ("train", "held-out") for token in data.parts[split][:].tolist()]


@pytest.mark.parametrize(("code", "letter"), [(8, "H"), (4, "i"), (5, "q"), (3, "h")])
@pytest.mark.parametrize("name", ["text", "text.bin", "text.idx"])
def test_megatrons_files_are_read(tmp_path: Path, code: int, letter: str, name: str):
    write_megatron(tmp_path / "text", code=code, letter=letter)
    data = opened(tmp_path / name, "megatron")
    assert all_tokens(data) == TOKENS
    assert data.batch(0, "train")["tokens"].dtype == np.int32


@pytest.mark.parametrize(("magic", "version", "letter"), [(20240520, 1, "H"), (20240801, 7, "I")])
def test_files_of_llm_c_are_read(tmp_path: Path, magic: int, version: int, letter: str):
    write_llm_c(tmp_path / "train.bin", magic=magic, version=version, letter=letter)
    assert all_tokens(opened(tmp_path / "train.bin", "llm.c")) == TOKENS


@pytest.mark.parametrize(("letter", "dtype"), [("H", "uint16"), ("I", "uint32")])
def test_files_of_datatrove_are_read(tmp_path: Path, letter: str, dtype: str):
    write_datatrove(tmp_path / "a.ds", letter=letter, metadata=f"gpt2|{struct.calcsize(letter)}\n245\n245 T")
    assert all_tokens(opened(tmp_path / "a.ds", "datatrove", f"data.dtype={dtype}")) == TOKENS


def segments_by_hand(starts: list[int]) -> list[list[int]]:
    """Number the documents of windows of nine tokens, by where each of `TOKENS` comes from."""
    owner = [number for number, document in enumerate(DOCUMENTS) for _ in document]
    return [[owner[start + n] - owner[start] for n in range(9)] for start in starts]


@pytest.mark.parametrize(
    "shape", ["megatron", "datatrove", "folder of datatrove", "two sequences a document"]
)
def test_an_index_says_where_documents_end(tmp_path: Path, shape: str):
    form = "datatrove" if "datatrove" in shape else "megatron"
    path = tmp_path
    if shape == "megatron":
        write_megatron(tmp_path / "text")
    elif shape == "datatrove":
        write_datatrove(path := tmp_path / "a.ds")
    elif shape == "folder of datatrove":
        write_datatrove(tmp_path / "b.ds", DOCUMENTS[4:])
        write_datatrove(tmp_path / "a.ds", DOCUMENTS[:4])
    else:
        halves = [half for each in DOCUMENTS for half in (each[:7], each[7:])]
        write_megatron(tmp_path / "text", halves, starts=list(range(0, 21, 2)))
    data = opened(path, form, "data.documents=packed", "batch.sequences=10")
    for split in ("train", "held-out"):
        for step in range(4):
            batch = data.batch(step, split)
            starts = [TOKENS.index(row[0]) for row in batch["tokens"].tolist()]
            assert batch["segments"].tolist() == segments_by_hand(starts)
            assert batch["segments"].dtype == np.int32


def test_empty_documents_end_once(tmp_path: Path):
    documents = [[1] * 5, [], [], [2] * 60]
    write_datatrove(tmp_path / "a.ds", documents)
    data = opened(tmp_path / "a.ds", "datatrove", "data.documents=packed")
    rows = {int(r[0]): s.tolist() for r, s in zip(*data.batch(0, "train").values(), strict=True)}
    assert rows[1] == [0] * 5 + [1] * 4


@pytest.mark.parametrize("form", ["raw", "megatron", "llm.c", "datatrove"])
@pytest.mark.parametrize("by_pattern", [False, True])
def test_the_files_of_a_folder_are_one_text_in_the_order_of_their_names(
    tmp_path: Path, form: str, by_pattern: bool
):
    parts = [DOCUMENTS[6:], DOCUMENTS[:2], DOCUMENTS[2:6]]
    for name, part in zip("cab", parts, strict=True):
        tokens = [token for document in part for token in document]
        if form == "megatron":
            write_megatron(tmp_path / name, part)
        elif form == "llm.c":
            write_llm_c(tmp_path / f"{name}.bin", tokens)
        elif form == "datatrove":
            write_datatrove(tmp_path / f"{name}.ds", part)
        else:
            np.array(tokens, "<u2").tofile(tmp_path / f"{name}.bin")
    ending = {"megatron": "idx", "datatrove": "ds"}.get(form, "bin")
    data = opened(tmp_path / f"[abc].{ending}" if by_pattern else tmp_path, form)
    assert all_tokens(data) == TOKENS
    seen = [data.batch(step, "train")["tokens"] for step in range(40)]
    starts = [TOKENS.index(row[0]) for row in np.concatenate(seen).tolist()]
    assert all(TOKENS[s : s + 9] == row for s, row in zip(starts, np.concatenate(seen).tolist(), strict=True))
    config = config_of(tmp_path, form)
    known, file = data_identity(config), tmp_path / f"b.{ending}"
    assert known is not None
    file.write_bytes(bytes(reversed(file.read_bytes())))
    assert data_identity(config)["sha256"] != known["sha256"]  # pyright: ignore


MEGATRON = [
    ({"magic": b"MMIDIDY\x00\x00"}, "begins with b'MMIDIDY", "it is another file"),
    ({"version": 2}, "has version 2, and version 1 is read", "copy it again"),
    ({"code": 7, "letter": "f"}, "code 7 (float32), which is no type of token ids", "preprocess_data.py"),
    ({"code": 9}, "code 9 (unknown)", "make the tokens again"),
    ({"keep": 400}, "the last sequence ends at byte 980, beyond the 400 bytes of text.bin", "copy both"),
    ({"begins": [0, 80, 999, *range(7)]}, "sequence 2 begins at byte 999 with 22 tokens", "copy it again"),
    ({"starts": [0, 5, 3, 10]}, "its documents do not ascend: 3 follows 5", "copy it again"),
    ({"starts": [0, 5, 9]}, "its documents are sequences 0 to 9 of 0 to 10", "copy it again"),
    ({"starts": [1, 5, 10]}, "its documents are sequences 1 to 10 of 0 to 10", "copy it again"),
    ({"more": b"\0" * 10}, "has a mode for each sequence, as multimodal data have", "text alone"),
    (
        {"more": b"\0" * 3},
        "is too long: 245 bytes, and 10 sequences with 11 document indices need 242",
        "copy",
    ),
    ({"starts": [0]}, "holds no document", "copy it again"),
]


@pytest.mark.parametrize(("wrong", "message", "hint"), MEGATRON)
def test_an_index_of_megatron_that_cannot_be_is_refused(tmp_path: Path, wrong: dict, message: str, hint: str):
    write_megatron(tmp_path / "text", **wrong)
    error = refused(tmp_path / "text", "megatron")
    assert message in error.message
    assert str(tmp_path / "text.idx") in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (100, "is cut short: 100 bytes, and 10 sequences with 11 document indices need 242"),
        (20, "is cut short: 20 bytes, and its header has 34"),
        (0, "is empty"),
    ],
)
def test_a_short_index_of_megatron_is_refused(tmp_path: Path, keep: int, message: str):
    write_megatron(tmp_path / "text")
    index = tmp_path / "text.idx"
    index.write_bytes(index.read_bytes()[:keep])
    assert message in refused(tmp_path / "text", "megatron").message


def test_an_index_of_megatron_without_its_ids_is_refused(tmp_path: Path):
    write_megatron(tmp_path / "text")
    (tmp_path / "text.bin").unlink()
    assert "is an index, and text.bin is not beside it" in refused(tmp_path, "megatron").message


LLM_C = [
    ({"magic": 20240522}, "is llm.c's file of an evaluation with choices", "a file of text"),
    ({"magic": 5}, "begins with 5, and llm.c's files with 20240520 or 20240801", 'data.format = "raw"'),
    ({"version": 2}, "has version 2; with magic 20240520 version 1 is read", "copy it again"),
    ({"count": 250}, "has 1514 bytes, and its header says 250 tokens of uint16, 1524 bytes", "copy it again"),
    ({"count": 0, "tokens": []}, "has 1024 bytes, and its header says 0 tokens", "copy it again"),
]


@pytest.mark.parametrize(("wrong", "message", "hint"), LLM_C)
def test_a_file_of_llm_c_that_cannot_be_is_refused(tmp_path: Path, wrong: dict, message: str, hint: str):
    write_llm_c(tmp_path / "a.bin", **wrong)
    error = refused(tmp_path / "a.bin", "llm.c")
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("keep", "message"), [(500, "500 bytes, and llm.c's header has 1024"), (0, "is empty")]
)
def test_a_short_file_of_llm_c_is_refused(tmp_path: Path, keep: int, message: str):
    write_llm_c(tmp_path / "a.bin")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:keep])
    assert message in refused(tmp_path / "a.bin", "llm.c").message


DATATROVE = [
    ({"ends": [20, 300]}, "ends at token 300, beyond the 245 tokens (uint16) of a.ds", "copy both again"),
    ({"ends": [20, 200]}, "ends at token 200, before the 245 tokens", "copy both again"),
    ({"letter": "I"}, "ends at token 245, before the 490 tokens", 'data.dtype = "uint32"'),
    ({"ends": [30, 20, 245]}, "its ends of documents do not ascend: 20 follows 30", "copy it again"),
    ({"metadata": "gpt2|4\n"}, "says 4 bytes an id, and data.dtype = 'uint16' has 2", '"uint32"'),
    ({"ends": []}, "a.ds.index is empty", "copy it again"),
]


@pytest.mark.parametrize(("wrong", "message", "hint"), DATATROVE)
def test_a_file_of_datatrove_that_cannot_be_is_refused(tmp_path: Path, wrong: dict, message: str, hint: str):
    write_datatrove(tmp_path / "a.ds", **wrong)
    error = refused(tmp_path / "a.ds", "datatrove")
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        (".loss", b"\1", "masks the loss of some tokens, and such masks are not applied"),
        (".index", b"abc", "3 bytes are no whole number of ends of 8 bytes"),
    ],
)
def test_what_lies_beside_a_file_of_datatrove_is_not_ignored(
    tmp_path: Path, ending: str, content: bytes, message: str
):
    write_datatrove(tmp_path / "a.ds")
    Path(f"{tmp_path / 'a.ds'}{ending}").write_bytes(content)
    assert message in refused(tmp_path / "a.ds", "datatrove").message


def test_packed_documents_need_an_index_or_an_id(tmp_path: Path):
    write_datatrove(tmp_path / "a.ds")
    (tmp_path / "a.ds.index").unlink()
    error = refused(tmp_path / "a.ds", "datatrove", "data.documents=packed")
    assert "no index says where documents end" in error.message
    assert "set data.end_of_document" in error.hint
    packed = ["data.documents=packed", "data.end_of_document=119"]
    assert "segments" in opened(tmp_path / "a.ds", "datatrove", *packed).batch(0, "train")


def test_another_format_is_not_read_as_raw(tmp_path: Path):
    write_llm_c(tmp_path / "a.bin")
    write_megatron(tmp_path / "b")
    for name, words, form in (("a.bin", "llm.c's header", "llm.c"), ("b.bin", "b.idx beside it", "megatron")):
        error = refused(tmp_path / name, "raw")
        assert words in error.message
        assert f'data.format = "{form}"' in error.hint


def test_a_token_outside_the_vocabulary_is_refused_in_each_format(tmp_path: Path):
    write_megatron(tmp_path / "m", [[1000] * 50])
    write_llm_c(tmp_path / "l.bin", [1000] * 50)
    write_datatrove(tmp_path / "d.ds", [[1000] * 50])
    for name, form in (("m", "megatron"), ("l.bin", "llm.c"), ("d.ds", "datatrove")):
        with pytest.raises(InputError, match=r"holds token 1000, outside model\.vocab_size = 1000"):
            opened(tmp_path / name, form).batch(0, "train")


def test_files_of_different_types_are_not_one_source(tmp_path: Path):
    write_megatron(tmp_path / "a", code=8, letter="H")
    write_megatron(tmp_path / "b")
    error = refused(tmp_path, "megatron")
    assert f"{tmp_path / 'a.bin'} holds uint16, and {tmp_path / 'b.bin'} int32" in error.message
    assert "in a mixture" in error.hint


def test_files_of_different_tokenizers_are_not_one_source(tmp_path: Path):
    write_datatrove(tmp_path / "a.ds", metadata="gpt2|2\n245")
    write_datatrove(tmp_path / "b.ds", metadata="mistral|2\n245")
    assert "tokens of different vocabularies" in refused(tmp_path, "datatrove").message


def test_paths_without_files_are_refused(tmp_path: Path):
    assert f"{tmp_path} has no file that ends in .ds" in refused(tmp_path, "datatrove").message
    assert f"no file matches {tmp_path / '*.ds'}" in refused(tmp_path / "*.ds", "datatrove").message
    assert f"no token file {tmp_path / 'text.idx'}" in refused(tmp_path / "text", "megatron").message


@pytest.mark.parametrize(
    ("more", "message", "hint"),
    [
        (
            ["data.format=megatron", "data.dtype=int32"],
            "data.dtype = 'int32' has no effect: the files of data.format = 'megatron'",
            "leave it out",
        ),
        (["data.format=webdataset"], 'data.format = "webdataset"', "raw"),
    ],
)
def test_a_type_that_the_files_say_is_not_given(more: list[str], message: str, hint: str):
    with pytest.raises(InputError) as caught:
        config_of(Path("a.bin"), "raw", *more)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("form", ["raw", "datatrove"])
def test_a_type_that_nothing_says_is_asked_for(tmp_path: Path, form: str):
    path = tmp_path / {"raw": "a.bin", "datatrove": "a.ds"}[form]
    np.arange(600, dtype="<u4").tofile(path)
    with pytest.raises(
        InputError, match=r"data.dtype is missing, and no a\.(bin.json|ds.metadata)"
    ) as caught:
        opened(path, form, "data.dtype=none")
    assert '"uint32"' in caught.value.hint
    if form == "datatrove":
        (tmp_path / "a.ds.metadata").write_text("gpt2|4")
        assert len(all_tokens(opened(path, form, "data.dtype=none"))) == 600


@pytest.mark.parametrize("name", ["*" * 3000, "*" * 200 + "x", "a**b", "x" * 3000, "a\0b*"])
def test_a_name_or_pattern_that_the_system_does_not_take_is_refused(tmp_path: Path, name: str):
    message = refused(tmp_path / name, "datatrove").message
    assert any(
        words in message for words in ("names no files", "no file matches", "no token file", "not a path")
    )
