"""Token files made from texts: complete or not there, resumed, by several processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.contrib.texts import TokenFileMetadata, open_tokenizer, pieces_of, read_metadata, tokenize
from meshwright.contrib.texts._tokenize import (
    Settings,
    TokenPart,
    as_dtype,
    finished_part,
    make_part,
    part_path,
    sha256_of,
    write_whole,
)
from meshwright.errors import InputError, MeshwrightError

pytestmark = pytest.mark.once


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Three files: 40 documents in lines, a text, 7 documents in lines."""
    numbers = random.Random(0)
    long = "".join(json.dumps({"text": "é" * numbers.randrange(30) + str(n)}) + "\n" for n in range(40))
    (tmp_path / "long.jsonl").write_text(long)
    (tmp_path / "text.txt").write_text("one\ntext\n")
    (tmp_path / "short.ndjson").write_text("".join(json.dumps({"text": f"{n}\n"}) + "\n" for n in range(7)))
    return [str(tmp_path / name) for name in ("long.jsonl", "text.txt", "short.ndjson")]


def wanted_of(texts: list[str], end: int | None = 256) -> list[int]:
    """Bytes of the documents in order, with an end behind each."""
    ids: list[int] = []
    for name in texts:
        content = Path(name).read_text()
        is_lines = not name.endswith(".txt")
        for text in [json.loads(line)["text"] for line in content.splitlines()] if is_lines else [content]:
            ids += [*text.encode(), *([] if end is None else [end])]
    return ids


@pytest.mark.parametrize("workers", [1, 2])
def test_the_file_holds_every_document_once_in_order(tmp_path: Path, texts: list[str], workers: int):
    seen: list[tuple[int, int]] = []
    to = tmp_path / "new" / "out.bin"
    facts = tokenize(
        texts,
        str(to),
        end_of_document="256",
        workers=workers,
        piece_bytes=200,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert np.fromfile(to, "<u2").tolist() == wanted_of(texts)
    assert facts == read_metadata(to)
    assert (facts.num_documents, facts.num_tokens) == (48, len(wanted_of(texts)))
    assert [each.num_documents for each in facts.inputs] == [40, 1, 7]
    assert [each.num_tokens for each in facts.inputs] == [len(wanted_of([name])) for name in texts]
    total = sum(Path(name).stat().st_size for name in texts)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert sorted(path.name for path in to.parent.iterdir()) == ["out.bin", "out.bin.json"]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32"])
def test_each_type_and_no_end(tmp_path: Path, texts: list[str], dtype: str):
    facts = tokenize(texts, str(tmp_path / "out.bin"), dtype=dtype, workers=1)
    assert np.fromfile(tmp_path / "out.bin", dtype).tolist() == wanted_of(texts, None)
    assert (facts.dtype, facts.end_of_document, facts.vocab_size) == (dtype, None, 256)


def test_a_tokenizer_file_gives_its_ids(tmp_path: Path, texts: list[str]):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"one": 5, "[U]": 1, "</s>": 70_000}, unk_token="[U]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    name = str(tmp_path / "tokenizer.json")
    made.save(name)
    with pytest.raises(InputError, match="has ids up to 70000, and uint16 holds at most 65535") as caught:
        tokenize(texts[1:], str(tmp_path / "out.bin"), tokenizer=name, end_of_document="</s>")
    assert caught.value.hint == "use --dtype uint32"
    facts = tokenize(
        texts[1:],
        str(tmp_path / "out.bin"),
        tokenizer=name,
        end_of_document="</s>",
        dtype="uint32",
        workers=2,
    )
    assert np.fromfile(tmp_path / "out.bin", "<u4").tolist() == [5, 1, 70_000, *([1, 70_000] * 7)]
    assert (facts.tokenizer, facts.vocab_size, facts.end_of_document) == ("tokenizer.json", 70_001, 70_000)


def test_what_is_done_is_not_done_again(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch):
    good = Path(texts[2]).read_text()
    Path(texts[2]).write_text(good + "{\n")
    to = tmp_path / "out.bin"
    with pytest.raises(InputError, match=r"short\.ndjson:8: not JSON"):
        tokenize(texts, str(to), end_of_document="256", workers=1, piece_bytes=200)
    assert not to.exists()
    Path(texts[2]).write_text(good)
    begun: list[str] = []
    from meshwright.contrib.texts import _tokenize

    real = _tokenize.make_part
    monkeypatch.setattr(_tokenize, "make_part", lambda *x: (begun.append(x[1].path), real(*x))[1])
    tokenize(texts, str(to), end_of_document="256", workers=1, piece_bytes=200)
    assert set(begun) == {texts[2]}
    assert np.fromfile(to, "<u2").tolist() == wanted_of(texts)


def test_an_error_of_a_worker_keeps_its_words(tmp_path: Path, texts: list[str]):
    Path(texts[0]).write_text("{\n")
    with pytest.raises(InputError, match=r"long\.jsonl:1: not JSON") as caught:
        tokenize(texts, str(tmp_path / "out.bin"), workers=2)
    assert caught.value.hint == "correct the line, or take it out"


def test_a_file_that_is_there_stays(tmp_path: Path, texts: list[str]):
    to = tmp_path / "out.bin"
    to.write_bytes(b"mine")
    for leftovers in (False, True):
        if leftovers:
            (tmp_path / "out.bin.partial").mkdir()
        with pytest.raises(InputError, match=r"out\.bin is there already"):
            tokenize(texts, str(to), workers=1)
        assert to.read_bytes() == b"mine"


def test_killed_while_it_tidied_up_the_same_command_finds_its_work_done(tmp_path: Path, texts: list[str]):
    to = tmp_path / "out.bin"
    facts = tokenize(texts, str(to), workers=1)
    (tmp_path / "out.bin.partial").mkdir()
    assert tokenize(texts, str(to), workers=1) == facts
    assert not (tmp_path / "out.bin.partial").exists()
    (tmp_path / "out.bin.partial").mkdir()
    with pytest.raises(InputError, match="is there already"):
        tokenize(texts, str(to), end_of_document="256", workers=1)


def test_two_processes_do_not_write_one_file(tmp_path: Path, texts: list[str]):
    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(InputError, match="another process is at work in"):
            tokenize(texts, str(tmp_path / "out.bin"), workers=1)

    tokenize(texts, str(tmp_path / "out.bin"), workers=1, on_progress=meanwhile)


def test_an_input_that_changes_meanwhile_is_noticed(tmp_path: Path, texts: list[str]):
    def meanwhile(done: int, total: int) -> None:
        Path(texts[1]).write_text("other")

    with pytest.raises(InputError, match=r"text\.txt changed while it was tokenized"):
        tokenize(texts, str(tmp_path / "out.bin"), workers=1, on_progress=meanwhile)


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ({"dtype": "uint8"}, "--dtype 'uint8': no type of tokens", "use uint16, int32 or uint32"),
        ({"workers": 0}, "--workers 0: at least one", "--workers 1"),
        ({"end_of_document": "<end>"}, "--end-of-document '<end>': with bytes", "256"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, texts: list[str], said: dict, message: str, hint: str
):
    with pytest.raises(InputError) as caught:
        tokenize(texts, str(tmp_path / "out.bin"), **said)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert not (tmp_path / "out.bin.partial").exists()


def test_a_worker_that_dies_is_told(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshwright.contrib.texts._tokenize.start_worker", sys.exit)
    with pytest.raises(MeshwrightError, match="a worker process died") as caught:
        tokenize(texts, str(tmp_path / "out.bin"), workers=2)
    assert "fewer --workers" in caught.value.hint


def command(texts: list[str], to: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", "data", "tokenize", *texts, "--to", str(to), *more]


def test_a_full_disk_is_told_and_the_work_goes_on_when_there_is_room(tmp_path: Path):
    text = tmp_path / "a.txt"
    text.write_text("x" * 100_000)
    said = command([str(text)], tmp_path / "out.bin", "--workers", "1")
    full = ["bash", "-c", 'ulimit -f 48; exec "$@"', "_", *said]  # no file above 48 blocks of 1024 bytes
    done = subprocess.run(full, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "error: cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.bin").exists()
    subprocess.run(said, check=True, capture_output=True)
    assert (tmp_path / "out.bin").stat().st_size == 200_000


def killed_until_done(texts: list[str], to: Path, times: int, seed: int) -> TokenFileMetadata:
    """Kill the command `times` times, at random moments before and within its work, then let it end."""
    moments, folder = random.Random(seed), to.with_name(f"{to.name}.partial")
    said = command(texts, to, "--end-of-document", "256", "--workers", "2")
    for number in range(times):
        before = len(list(folder.glob("*.json")))
        process = subprocess.Popen(said, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if number % 4:  # one in four at any moment, the others once something new is done
            while process.poll() is None and len(list(folder.glob("*.json"))) == before:
                time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        assert b"Traceback" not in process.communicate()[1]
        if to.exists():
            break
    if not to.exists() or folder.exists():
        subprocess.run(said, check=True, capture_output=True)
    facts = read_metadata(to)
    assert facts is not None
    return facts


def many_texts(folder: Path, count: int) -> list[str]:
    for number in range(count):
        lines = (json.dumps({"text": f"{number} {line} é"}) for line in range(3))
        (folder / f"{number:04}.jsonl").write_text("\n".join(lines))
    return sorted(map(str, folder.glob("*.jsonl")))


@pytest.mark.parametrize(
    ("times", "count"),
    [pytest.param(4, 1500, marks=pytest.mark.wide), pytest.param(25, 9000, marks=pytest.mark.long)],
    ids=["few", "many"],
)
def test_killed_at_any_moment_no_document_is_lost_or_doubled(tmp_path: Path, times: int, count: int):
    (tmp_path / "texts").mkdir()
    texts, to = many_texts(tmp_path / "texts", count), tmp_path / "out.bin"
    facts = killed_until_done(texts, to, times, seed=count)
    assert np.array_equal(np.fromfile(to, "<u2"), np.array(wanted_of(texts), np.uint16))
    assert facts.num_documents == 3 * count
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.bin", "out.bin.json", "texts"]


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
    assert made == TokenPart(num_tokens=4, num_documents=2) == finished_part(path, "uint16")
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
