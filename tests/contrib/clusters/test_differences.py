"""Processes that compare what they are about to do, in threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.contrib.clusters import ProcessGroup
from meshwright.errors import CompileError, InputError
from meshwright.trainer.launch import SingleProcess, agreed
from tests.contrib.clusters.test_peers import each


def compare(facts: list[dict[str, Any]], hosts: str = "abcd") -> list[Any]:
    """What each process gets that has these facts: a pair of its index and a digest, or an error."""
    return each(
        len(facts),
        lambda peers: agreed(peers, "run", lambda: peers.index, lambda index: facts[index]),
        hosts=hosts,
    )


def test_processes_with_the_same_facts_go_on_with_one_digest_of_them():
    facts = {"settings": {"seed": 0}, "files": {}, "software": {"the version of jax": "1"}}
    (first, digest), (second, other) = compare([facts, dict(reversed(facts.items()))])
    assert (first, second) == (0, 1)
    assert digest == other
    assert compare([{**facts, "settings": {"seed": 1}}] * 2)[0][1] != digest


@pytest.mark.parametrize(
    ("section", "name", "one", "other", "words"),
    [
        (
            "settings",
            "optimizer.learning_rate",
            0.1,
            0.2,
            "optimizer.learning_rate is 0.1 in process 0 on a, and 0.2",
        ),
        ("settings", "steps", 60, 90, "steps is 60 in process 0 on a, and 90"),
        ("settings", "resume", True, False, "resume is true in process 0 on a, and false"),
        (
            "settings",
            "checkpoint.every_steps",
            None,
            5,
            "checkpoint.every_steps is null in process 0 on a, and 5",
        ),
        (
            "files",
            "the data x.bin",
            "3 bytes",
            "4 bytes",
            "the data x.bin is 3 bytes in process 0 on a, and 4 bytes",
        ),
        ("software", "the version of jax", "0.10.2", "0.12.0", "jax is 0.10.2 in process 0 on a, and 0.12.0"),
    ],
)
def test_a_difference_is_named_in_every_process_with_both_values(section, name, one, other, words):
    for error in compare([{section: {name: one, "same": 1}}, {section: {name: other, "same": 1}}]):
        assert isinstance(error, InputError)
        assert f"the processes of this run differ: {name} is " in error.message
        assert error.message.endswith(f"{words} in process 1 on b")


def test_what_only_one_process_has_is_named():
    (error, _) = compare([{"settings": {"XLA_FLAGS --x": "1"}}, {"settings": {}}])
    assert "XLA_FLAGS --x is 1 in process 0 on a, and absent in process 1 on b" in error.message


def test_of_many_processes_and_differences_a_few_are_named():
    odd, same = {"settings": {f"key{n}": 1 for n in range(9)}}, {"settings": {f"key{n}": 0 for n in range(9)}}
    error = compare([same, same, odd, same])[3]
    assert (
        "key0 is 0 in process 0 on a and process 1 on b and 1 more, and 1 in process 2 on c" in error.message
    )
    assert error.message.endswith("; 5 more")
    assert "key4" not in error.message


def test_each_kind_of_difference_has_its_hint():
    one = {"settings": {"a": 1}, "files": {"b": 1}, "software": {"c": 1}}
    other = {"settings": {"a": 2}, "files": {"b": 2}, "software": {"c": 2}}
    hint = compare([one, other])[0].hint
    assert hint.split("; ") == [
        "start every process with the same command, environment and configuration",
        "put the files on a disk that all hosts share, or copy them again to each",
        "install the same packages for every process",
    ]


def test_a_long_value_is_cut():
    error = compare([{"settings": {"a": "x" * 5000}}, {"settings": {"a": "y"}}])[0]
    assert len(error.message) < 300


def refused_in(*indices: int, kind: type = InputError) -> list[Any]:
    def make(peers: ProcessGroup) -> Callable[[], int]:
        def attempt() -> int:
            if peers.index in indices:
                raise kind(f"no preset in {peers.index}", hint="name one")
            return peers.index

        return attempt

    return each(3, lambda peers: agreed(peers, "run", make(peers), lambda index: {}), hosts="abc")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_error_in_one_process_ends_all_at_once_with_its_name(index):
    for error in refused_in(index):
        assert type(error) is InputError
        where = f"process {index} on {'abc'[index]}"
        assert (
            error.message
            == f"{where} cannot train: no preset in {index}. The other processes have no such error"
        )
        assert error.hint == "name one"


def test_an_error_in_all_processes_is_each_ones_own():
    errors = refused_in(0, 1, 2, kind=CompileError)
    assert [type(error) for error in errors] == [CompileError] * 3
    assert [error.message for error in errors] == [f"no preset in {index}" for index in range(3)]


def test_processes_that_count_each_other_differently_differ():
    def other_count(peers: ProcessGroup) -> Any:
        mine = ProcessGroup(peers._client, peers.index, 2 + peers.index, host="a")
        return agreed(mine, "run", lambda: 0, lambda index: {})

    error = each(2, other_count)[0]
    assert "the number of processes is 2 in process 0 on a, and 3 in process 1 on a" in error.message


def test_a_process_alone_compares_nothing():
    def never(made: int) -> Any:
        raise AssertionError("facts cost time")

    assert agreed(SingleProcess(), "run", lambda: 7, never) == (7, "")
