"""Batches made before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

DEPTH = 2


def batches_ahead(make: Callable[[int], Any], steps: range) -> Generator[Any, None, None]:
    """`make(step)` for each step in order, made at most two ahead by one thread.

    What `make` raises is raised where its batch is taken. Close the iterator to stop the thread.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="meshwright-batches")
    try:
        waiting: deque[Future[Any]] = deque(pool.submit(make, step) for step in steps[:DEPTH])
        for step in steps[DEPTH:]:
            batch = waiting.popleft().result()
            waiting.append(pool.submit(make, step))
            yield batch
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
