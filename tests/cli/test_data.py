import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli import main


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("hé")
    return str(tmp_path / "a.txt")


def test_the_answer_says_what_was_made(meshwright, tmp_path: Path, text: str):
    done = meshwright("data", "tokenize", text, "--to", str(tmp_path / "t.bin"), "--end-of-document", "256")
    assert (done.status, done.talk) == (0, "")
    assert " ".join(done.output.split()).endswith(
        "t.bin: 4 tokens of 1 documents, each ending with 256; uint16, vocabulary 257"
    )
    assert np.fromfile(tmp_path / "t.bin", "<u2").tolist() == [104, 0xC3, 0xA9, 256]


def test_as_json_it_is_what_lies_beside_the_file(meshwright, tmp_path: Path, text: str):
    said = ("--dtype", "uint32", "--workers", "1", "--text-key", "body", "--tokenizer", "bytes", "--json")
    done = meshwright("data", "tokenize", text, "--to", str(tmp_path / "t.bin"), *said)
    assert done.json == json.loads((tmp_path / "t.bin.json").read_text())
    assert done.json["inputs"][0]["path"] == text


def test_a_mistake_is_told_in_words_with_status_2(meshwright, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    done = meshwright("data", "tokenize", str(tmp_path / "a.jsonl"), "--to", str(tmp_path / "t.bin"))
    assert (done.status, done.output) == (2, "")
    assert done.talk.startswith(f"error: {tmp_path / 'a.jsonl'}:2: not JSON: ")
    assert "hint: correct the line" in done.talk


def test_on_a_terminal_there_is_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    (tmp_path / "a.txt").write_text("x" * 4000)
    words = ["meshwright", "data", "tokenize", str(tmp_path / "a.txt"), "--to", str(tmp_path / "a.bin")]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = sys.stderr.getvalue()  # pyright: ignore
    assert "tokenizing" in shown
    assert "4.0/4.0 kB" in shown


def test_a_small_set_of_images_is_made(meshwright, tmp_path: Path):
    done = meshwright("data", "sample-images", "--to", str(tmp_path / "one"))
    assert "4,096 images to train and 1,024 held out" in " ".join(done.output.split())
    assert len(list((tmp_path / "one").iterdir())) == 4
    done = meshwright("data", "sample-images", "--to", str(tmp_path / "two"), "--json")
    assert done.json == {"folder": str(tmp_path / "two"), "rows": {"train": 4096, "held-out": 1024}}
