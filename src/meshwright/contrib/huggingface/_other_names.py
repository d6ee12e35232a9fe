"""Read arrays whose names in some files are others than those of their class.

The text part of a model that reads images or sound too has longer ones: "language_model.model.layers.0..."
and "model.language_model.layers.0..." for the array "model.layers.0..." of the text's own class. And what
`transformers` saves has other names than the published files of a few families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ._mxfp4 import BLOCKS

PART = "language_model."


def of_text_part(read: Callable[[str], Any], names: set[str]) -> Callable[[str], Any]:
    """Return a function that reads arrays of the text part by the names that its own class gives them.

    Args:
        read: returns an array by the name in the files, or the one of which it has a part there.
        names: of all arrays in the files.

    >>> of_text_part(str, {"model.language_model.norm.weight"})("model.norm.weight")
    'model.language_model.norm.weight'
    """

    def read_part(name: str) -> Any:
        longer = f"{PART}{name}", f"model.{PART}{name.removeprefix('model.')}"
        return read(next((each for each in longer if each in names or each + BLOCKS in names), name))

    return read_part


def by_other_names(
    read: Callable[[str], Any], names: set[str], others: Mapping[str, str]
) -> Callable[[str], Any]:
    """Return a function that reads arrays by their published names, or by those that `transformers` writes.

    Args:
        read, names: as for `of_text_part`.
        others: a part of what `transformers` writes, by the published one.

    >>> by_other_names(str, {"a.moe.up"}, {".mlp.": ".moe."})("a.mlp.up")
    'a.moe.up'
    """

    def read_other(name: str) -> Any:
        found = (name.replace(part, other) for part, other in others.items())
        return read(name if name in names else next((each for each in found if each in names), name))

    return read_other
