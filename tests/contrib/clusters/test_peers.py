"""Peers in threads of one process, over a dictionary in place of jax's coordination service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshwright.contrib.clusters import ProcessGroup
from meshwright.errors import CompileError, InputError, MeshwrightError
from meshwright.trainer.launch import SingleProcess


class Store:
    """As jax's client: what is not there in time is an error with DEADLINE_EXCEEDED."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            assert allow_overwrite or key not in self.values, f"{key} is set twice"
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, 0.01):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            del self.values[key]


def each(count: int, do: Callable[[ProcessGroup], Any], hosts: str = "aaaa") -> list[Any]:
    """What `do` gives in each of so many processes."""
    store = Store()
    with ThreadPoolExecutor(count) as pool:
        done = [
            pool.submit(do, ProcessGroup(store, index, count, host=hosts[index])) for index in range(count)
        ]
        return [one.exception(30) or one.result() for one in done]


def test_what_the_first_makes_all_have():
    assert (
        each(3, lambda peers: peers.broadcast("x", lambda: {"made by": peers.index})) == [{"made by": 0}] * 3
    )


def test_a_second_time_is_another_time():
    def twice(peers: ProcessGroup) -> list[int]:
        return [peers.broadcast("x", lambda n=n: n) for n in range(2)]

    assert each(2, twice) == [[0, 1]] * 2


@pytest.mark.parametrize("kind", [MeshwrightError, InputError, CompileError])
def test_what_the_first_is_told_by_an_error_all_are_told(kind):
    def fail() -> None:
        raise kind("no room", hint="make some")

    for error in each(3, lambda peers: peers.broadcast("x", fail)):
        assert type(error) is kind
        assert (error.message, error.hint) == ("no room", "make some")


def test_every_value_is_gathered_in_order_and_not_kept():
    stores: list[Any] = []

    def gather(peers: ProcessGroup) -> list[int]:
        stores.append(peers._client)
        return peers.gathered("x", peers.index**2)

    assert each(4, gather) == [[0, 1, 4, 9]] * 4
    assert [key for key in stores[0].values if "/of/" in key] == []


def test_a_host_makes_once_what_its_processes_find_in_a_cache():
    begun: list[int] = []

    def make(peers: ProcessGroup) -> Any:
        def slowly() -> int:
            begun.append(peers.index)
            time.sleep(0.05)
            return peers.index

        return peers.run_sequentially(slowly)

    assert each(4, make, hosts="aabb") == [0, 1, 2, 3]
    assert begun[:2] == [0, 2]


def test_the_process_says_its_number_and_host():
    assert each(2, lambda peers: peers.name, hosts="ab") == ["process 0 of 2 on a", "process 1 of 2 on b"]


def test_an_error_of_the_service_that_is_no_deadline_ends_the_wait():
    class Gone(Store):
        def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
            raise RuntimeError("UNAVAILABLE: the coordinator is gone")

    with pytest.raises(RuntimeError, match="coordinator is gone"):
        ProcessGroup(Gone(), 1, 2).broadcast("x", dict)


def test_alone_all_is_what_one_makes():
    alone = SingleProcess()
    assert (alone.broadcast("x", lambda: 1), alone.gathered("x", 2), alone.run_sequentially(lambda: 3)) == (
        1,
        [2],
        3,
    )
    assert alone.is_first
