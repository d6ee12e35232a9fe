"""Read the text part of a model that reads images or sound too, whose arrays have longer names.

Beside the file's own names there are those that `transformers` writes: "language_model.model.layers.0..." and
"model.language_model.layers.0..." for the array "model.layers.0..." of the text's own class.
"""

from __future__ import annotations

from collections.abc import Callable
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
