import sysconfig
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.data import TokenWindows, open_data
from meshwright.data._token_files import stdlib_parts
from meshwright.errors import InputError


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
