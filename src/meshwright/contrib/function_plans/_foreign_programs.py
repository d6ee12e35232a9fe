"""Answer what the search of a plan asks of a program that is not ours.

Used by: `_function_plan`, `contrib.torch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.results import Weighing


class ForeignPrograms:
    """Answer for programs that are not ours what the search asks of loops, overrides and the cache."""

    def is_cached(self, row: int) -> bool:
        """Return False: the cache has a foreign program under its lowered text, which must be made first."""
        return False

    def unrolled(self, row: int) -> None:
        """Return None: the program's loops are its own."""

    @property
    def unrolling_seconds(self) -> float:
        """Return 0: the program's loops are its own."""
        return 0.0

    def weigh_with(self, overrides: Mapping[str, Any]) -> Weighing:
        """Raise: nothing has other overrides than those of a candidate."""
        raise AssertionError(f"no candidate has {overrides}")
