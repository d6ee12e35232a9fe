"""What a session of tests compiles is there for the next one: tests/kept.py."""

import os
from pathlib import Path

import pytest

from tests import kept

pytestmark = pytest.mark.once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = kept.kept_folder()
    assert found is not None
    assert found.is_relative_to(tmp_path)
    return found


def made(session: Path, name: str, num_bytes: int = 3) -> Path:
    (session / "executables/tests").mkdir(parents=True, exist_ok=True)
    (session / "compiled" / name).mkdir(parents=True)
    (session / f"executables/tests/{name}-cache").write_bytes(b"x" * num_bytes)
    (session / f"compiled/{name}/manifest.json").write_text(name)
    return session


def names(session: Path) -> set[str]:
    return {path.name for path in kept.entries_of(session)}


def test_the_next_session_has_what_two_before_it_compiled(folder: Path, tmp_path: Path):
    for name in ("one", "two"):
        kept.keep(made(tmp_path / name, name))
    kept.bring(tmp_path / "next")
    assert names(tmp_path / "next") == {"one", "one-cache", "two", "two-cache"}
    assert (tmp_path / "next/compiled/two/manifest.json").read_text() == "two"


def test_what_a_killed_session_has_half_written_is_not_brought(folder: Path, tmp_path: Path):
    made(folder, f"{kept.MAKING}7-one")
    kept.bring(tmp_path / "next")
    assert names(tmp_path / "next") == set()
    os.utime(folder / f"compiled/{kept.MAKING}7-one", (1e9, 1e9))
    kept.keep(tmp_path / "next")
    assert not (folder / f"compiled/{kept.MAKING}7-one").exists()


def test_the_oldest_of_too_many_go(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for age, name in enumerate(("new", "old")):
        kept.keep(made(tmp_path / name, name, 10_000))
        for path in kept.entries_of(folder):
            if path.name.startswith(name):
                os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(kept, "MOST_BYTES", 30_000)
    kept.keep(made(tmp_path / "newest", "newest", 10_000))
    assert "old" not in names(folder)
    assert {"new-cache", "newest", "newest-cache"} <= names(folder)
