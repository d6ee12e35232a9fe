"""Files that others wrote: what is no file, too large, too deep or leads elsewhere is refused in words."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright import files
from meshwright.compiler import RulesFile
from meshwright.config import load_config
from meshwright.contrib.calibration import kineto_step, xplane_events
from meshwright.contrib.huggingface import WeightFiles
from meshwright.contrib.prices import list_prices
from meshwright.contrib.texts import open_tokenizer, tokenize
from meshwright.errors import InputError
from meshwright.trainer.data import open_data

STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe, not a file": lambda path: os.mkfifo(path),
    "a device, not a file": lambda path: path.symlink_to("/dev/zero"),
    "Is a directory": lambda path: path.mkdir(),
}


def mixture(path: Path) -> object:
    return open_data(load_config("bytes-nano", {"data.source": "mixture", "data.path": str(path)}))


def chat(path: Path) -> object:
    named = {"data.source": "instructions", "data.path": str(path), "data.tokenizer": "bytes"}
    return open_data(load_config("bytes-nano", {**named, "model.vocab_size": 257}))


def described_tokens(path: Path) -> object:
    (path.parent / "a.bin").write_bytes(bytes(1000))
    named = {"data.source": "tokens", "data.path": str(path.parent / "a.bin"), "data.dtype": "uint16"}
    return open_data(load_config("bytes-nano", named))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a run's TOML": ("run.toml", lambda path: load_config(str(path))),
    "a model's config": ("config.json", lambda path: load_config(str(path))),
    "a mixture": ("mixture.toml", mixture),
    "conversations": ("chat.jsonl", chat),
    "the metadata of tokens": ("a.bin.json", described_tokens),
    "a tokenizer": ("tokenizer.json", lambda path: open_tokenizer(str(path))),
    "a text": ("a.txt", lambda path: tokenize([str(path)], str(path.parent / "made.bin"))),
    "a trace": ("trace.json", kineto_step),
    "a packed trace": ("trace.json.gz", kineto_step),
    "an XPlane": ("t.xplane.pb", lambda path: list(xplane_events(path))),
    "weights": ("model.safetensors", lambda path: WeightFiles(path.parent)),
    "an index of weights": ("model.safetensors.index.json", lambda path: WeightFiles(path.parent)),
    "prices": ("prices.toml", lambda path: list_prices("H100", refreshed=path)),
    "rules": ("rules.py", RulesFile.read),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=list(READERS))
@pytest.mark.parametrize("words", STRANGE)
def test_what_is_no_file_is_not_waited_for_and_not_read_without_end(name, read, words, tmp_path):
    if name == "tokenizer.json":
        pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    place = tmp_path / "place"
    place.mkdir()
    STRANGE[words](place / name)
    with pytest.raises(InputError) as refused:
        read(place / name)
    if words != "Is a directory":  # which is a name of texts and traces
        assert words in refused.value.message


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(OSError, match="it has more than 1,000 bytes"):
        files.read_bytes(path, 1000)
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\r")
    assert files.read_text(path, 8) == "a\nb\n"
    for name in ("a\0b", "a\ud800"):
        with pytest.raises(OSError, match="it is no name of a file"):
            files.read_bytes(tmp_path / name, 10)


def test_a_packed_file_that_unpacks_without_end_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ALWAYS_UNPACKED", 2**20)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(2**23)))
    with pytest.raises(OSError, match="it has more than "):
        files.read_gzip(path, 2**30)
    path.write_bytes(gzip.compress(bytes(2**19)))
    assert len(files.read_gzip(path, 2**30)) == 2**19
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="it is no whole gzip file"):
        files.read_gzip(path, 2**30)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 101 + "]" * 101, "it is nested 101 levels deep, and 100 are read"),
        ("[" * 100_000, "it is nested 100000 levels deep"),
        ('{"a":' * 300 + "1" + "}" * 300, "it is nested 300 levels deep"),
        ("9" * 301, "a number has 301 digits, and 300 are read"),
        ('{"a": 1, "b": {"c": 2, "c": 3}}', "the name 'c' is given twice"),
        ('["\\ud800"]', r"it has half of a pair, \\ud800"),
        ("[1", "Expecting"),
    ],
)
def test_json_of_a_stranger_has_limits(text, words):
    with pytest.raises(ValueError, match=words):
        files.parsed_json(text)


def test_json_within_the_limits_is_read_as_it_is():
    brackets = '"' + "[{" * 200 + '\\"]\\\\"'  # within a text they are no levels
    assert files.parsed_json(f'{{"a": {brackets}, "b": [1, 2.5, null]}}')["b"] == [1, 2.5, None]
    assert files.parsed_json("[" * 100 + "]" * 100)
    assert files.parsed_json('"\\ud83d\\ude00"') == "\U0001f600"
    assert files.parsed_json('{"a": 1, "a": 2}', strict=False) == {"a": 2}
    assert files.parsed_json(b"\xef\xbb\xbf[1]") == [1]


def test_toml_that_would_take_hours_is_refused():
    with pytest.raises(ValueError, match="line 2 has 1,500 dots, and 1,000 are read"):
        files.parsed_toml("a = 1\n" + "a." * 1500 + "a = 1")
    with pytest.raises(ValueError, match="it is nested too deeply"):
        files.parsed_toml("a = " + "[" * 5000)


@pytest.mark.parametrize("name", ["../a", "/a", "b/../../a", "", 5, None, ["a"], "a\0"])
def test_a_file_that_another_one_names_stays_in_its_folder(name):
    with pytest.raises(ValueError, match="is not the name of a file in its folder"):
        files.within(Path("model"), name)


def test_the_last_lines_are_read_from_the_end_and_are_short(tmp_path):
    path = tmp_path / "said"
    path.write_bytes(b"first\n\n" + b"x" * 2**20 + b"\nlast \xff\n\n")
    before, last = files.last_lines(path, 2)
    assert (before, last) == ("x" * 497 + "...", "last \ufffd")


def test_a_message_keeps_its_beginning_and_its_end():
    error = InputError("begin " + "x" * 10**6 + " end", hint="y" * 10**6)
    assert len(str(error)) < 30_000
    assert error.message.startswith("begin ")
    assert error.message.endswith(" end")
    assert "characters ..." in error.message
