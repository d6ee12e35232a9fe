import dataclasses
import multiprocessing
import os
import time

import pytest

from meshwright.compiler import (
    TEXTS,
    Compiled,
    CorruptFolder,
    cache_root,
    cached_program,
    keep_beside,
    keep_program,
    kept_beside,
    making_program,
    program_folder,
)
from meshwright.errors import InputError
from meshwright.subprocesses import ABANDONED_SECONDS

MOST_BESIDE = 8  # texts beside one program

NUM_WRITERS = 4


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache of its own."""
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MESHWRIGHT_CACHE_BYTES", raising=False)
    return tmp_path


def publish(key, compiled, used=None):
    with making_program() as made:
        compiled.save(made, dict.fromkeys(TEXTS, "text"))
        keep_program(made, key)
    if used is not None:
        os.utime(program_folder(key), (used, used))


def kept():
    return sorted(path.name for path in (cache_root() / "compiled").iterdir())


def num_bytes(key):
    return sum(path.stat().st_size for path in program_folder(key).iterdir())


def publish_at_once(root, compiled, barrier, failures):
    os.environ["MESHWRIGHT_CACHE_DIR"] = root
    os.environ["MESHWRIGHT_CACHE_BYTES"] = "1"  # each also prunes what the others publish
    try:
        for round_ in range(10):
            barrier.wait()
            publish(f"same-{round_}", compiled)
            found = cached_program(f"same-{round_}")
            assert found in (compiled, None)
    except BaseException as failure:
        barrier.abort()
        failures.put(repr(failure))


def test_processes_that_publish_the_same_program_at_once_leave_one_whole_copy(cache, compiled):
    context = multiprocessing.get_context("spawn")
    barrier, failures = context.Barrier(NUM_WRITERS), context.SimpleQueue()
    arguments = (str(cache), compiled, barrier, failures)
    writers = [context.Process(target=publish_at_once, args=arguments) for _ in range(NUM_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failures.empty(), failures.get()
    assert kept() == ["same-9"]
    assert cached_program("same-9") == compiled


def test_the_second_of_two_writers_leaves_the_first_ones_copy(cache, compiled):
    publish("key", compiled)
    publish("key", dataclasses.replace(compiled, name="late"))
    assert cached_program("key") == compiled
    assert kept() == ["key"]


def test_what_was_never_published_is_not_found(cache):
    assert cached_program("key") is None


@pytest.mark.parametrize("harm", ["truncate", "alter", "remove", "no manifest", "broken manifest"])
def test_a_corrupt_entry_is_gone_and_built_again(cache, compiled, harm):
    publish("key", compiled)
    place = program_folder("key")
    program = place / "program.hlo.txt.gz"
    match harm:
        case "truncate":
            program.write_bytes(program.read_bytes()[:-5])
        case "alter":
            (place / "compiled.json").write_text(
                (place / "compiled.json").read_text().replace("small", "large")
            )
        case "remove":
            program.unlink()
        case "no manifest":
            (place / "manifest.json").unlink()
        case _:
            (place / "manifest.json").write_text("{")
    with pytest.raises(CorruptFolder, match="key"):
        Compiled.load(place)
    assert cached_program("key") is None
    assert kept() == []
    publish("key", compiled)
    assert cached_program("key") == compiled


def test_the_limit_takes_what_was_used_longest_ago(cache, compiled, monkeypatch):
    now = time.time()
    for age, key in enumerate(("new", "middle", "old")):
        publish(key, compiled, used=now - 1000 * (age + 1))
    assert cached_program("old") is not None  # now it is the one used last
    monkeypatch.setenv("MESHWRIGHT_CACHE_BYTES", str(3 * num_bytes("old")))
    publish("newest", compiled)
    assert kept() == ["new", "newest", "old"]


def test_the_newest_stays_whatever_the_limit(cache, compiled, monkeypatch):
    publish("from the future", compiled, used=time.time() - 1)
    monkeypatch.setenv("MESHWRIGHT_CACHE_BYTES", "1")
    publish("newest", compiled)
    assert kept() == ["newest"]


def test_what_a_killed_process_left_is_removed_after_a_day_by_the_next_that_begins(cache):
    entries = cache / "compiled"
    left, gone, fresh = (entries / name for name in (".making-left", ".gone-left", ".making-fresh"))
    long_ago = time.time() - 2 * ABANDONED_SECONDS
    for folder in (left, gone, fresh):
        folder.mkdir(parents=True)
        (folder / "file").write_text("")
    for folder in (left, gone):
        os.utime(folder, (long_ago, long_ago))
    with making_program() as made:
        os.utime(made.parent, (long_ago, long_ago))  # it takes long, and its process lives
        with making_program():
            assert not left.exists()
            assert not gone.exists()
            assert made.is_dir()
            assert fresh.exists()
    assert kept() == [".making-fresh"]


def test_a_limit_that_is_no_number(cache, compiled, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE_BYTES", "2G")
    with pytest.raises(InputError, match="MESHWRIGHT_CACHE_BYTES = '2G' is not a number of bytes"):
        publish("key", compiled)


def test_the_cache_lies_where_it_is_told_or_among_the_users_caches(cache, monkeypatch):
    assert cache_root() == cache
    monkeypatch.delenv("MESHWRIGHT_CACHE_DIR")
    assert cache_root().name == "meshwright"


def test_texts_beside_a_program_are_kept_while_it_is_and_only_the_newest(cache, compiled, monkeypatch):
    publish("one", compiled)
    folder = program_folder("one")
    for number in range(MOST_BESIDE + 3):
        keep_beside(folder, f"figures-{number}", f"text {number}")
        os.utime(folder / f"beside-figures-{number}.gz", (number, number))
    found = [number for number in range(MOST_BESIDE + 3) if kept_beside(folder, f"figures-{number}")]
    assert found == [*range(3, MOST_BESIDE + 3)]
    assert kept_beside(folder, "figures-3") == "text 3"
    assert cached_program("one") == compiled
    keep_beside(cache / "pruned just now", "figures", "text")  # nothing is kept, and nothing is raised
    assert not (cache / "pruned just now").exists()
    monkeypatch.setenv("MESHWRIGHT_CACHE_BYTES", "1")
    publish("two", compiled)
    assert kept() == ["two"]
