"""Read the file of a mixture: its sources, their weights, and whether their tokenizers agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.config import MixtureData, TokenFileData
from meshwright.errors import InputError, nearest_name
from meshwright.files import read_toml, reason
from meshwright.trainer.data import BYTES, TokenWindows

MOST_WEIGHT = 1e18  # so that their sum is a number
_KEYS = ("path", "weight", "format", "dtype")
_EXAMPLE = 'write [[source]] with path = "web.bin", dtype = "uint16" and weight = 0.7, once for each source'


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSource:
    """A source of a mixture as its file lists it, with the mixture's own settings in `data`."""

    data: TokenFileData
    weight: float


def read_mixture(mixture: MixtureData) -> tuple[WeightedSource, ...]:
    """Read the sources that a mixture's file lists; their paths are relative to that file.

    Raises:
        InputError: the file cannot be read, or a source is not described as it must be.
    """
    path = Path(mixture.path)
    try:
        tree = read_toml(path)
    except OSError as refused:
        raise InputError(
            f"data.path: cannot read the mixture {path}: {reason(refused)}",
            hint=f"make the file: {_EXAMPLE}",
        ) from refused
    except ValueError as wrong:
        raise InputError(f"{path} is not TOML: {wrong}", hint="correct the line that it names") from wrong
    sources = tree.pop("source", None)
    if tree or not isinstance(sources, list) or not sources:
        known = ", ".join(tree) or "nothing"
        raise InputError(f"{path} is no mixture: it holds {known} beside its sources", hint=_EXAMPLE)
    listed = tuple(_source(f"{path}: source {n}", each, mixture) for n, each in enumerate(sources, 1))
    named = [each.data.path for each in listed]
    for name in named:
        if named.count(name) > 1:
            raise InputError(
                f"{path}: {name} is named twice", hint="name it once, with the sum of the weights"
            )
    return listed


def _source(where: str, table: Any, mixture: MixtureData) -> WeightedSource:
    if not isinstance(table, dict):
        raise InputError(f"{where} is no table", hint=_EXAMPLE)
    for key in table:
        if key not in _KEYS:
            raise InputError(f"{where}: {key} is not a key of a source", hint=nearest_name(key, _KEYS))
    weight, path = table.get("weight"), table.get("path")
    if not isinstance(weight, int | float) or weight is True or not 0 < weight <= MOST_WEIGHT:
        what = f"weight = {str(weight)[:40]} is no number above 0 and up to {MOST_WEIGHT:g}"
        what = "weight is missing" if weight is None else what
        raise InputError(f"{where}: {what}", hint="give a share, as in weight = 0.3, or leave the source out")
    if not isinstance(path, str) or not path:
        raise InputError(f"{where}: path is missing", hint='name a file or a folder, as in path = "web.bin"')
    chosen = {key: table[key] for key in ("format", "dtype") if key in table}
    shared = mixture.model_dump(include={"held_out_fraction", "order", "documents", "end_of_document"})
    try:
        there = str((Path(mixture.path).parent / path).resolve())
    except (ValueError, RuntimeError) as wrong:  # a zero byte, or links in a circle
        raise InputError(f"{where}: path = {path[:100]!r} is no path: {wrong}", hint="name a file") from wrong
    try:
        data = TokenFileData.model_validate({"source": "tokens", "path": there, **shared, **chosen})
    except ValidationError as wrong:
        first = wrong.errors(include_url=False)[0]
        words = " ".join([*map(str, first["loc"]), first["msg"]])
        raise InputError(f"{where}: {words}", hint="correct this source's table") from wrong
    return WeightedSource(data=data, weight=float(weight))


def seed_of(seed: int, number: int) -> int:
    """Return the seed of a source's own order; that of the first is the run's."""
    return seed + (number << 32)


def check_tokenizers(sources: Sequence[TokenWindows]) -> None:
    """Raise if two files are known to be of different tokenizers.

    Names of tokenizers are compared within one format only: elsewhere the same one may have another name.
    """
    known = [(source.name, kind, tokenizer) for source in sources for kind, tokenizer in source.tokenizers]
    for place, (name, kind, tokenizer) in enumerate(known):
        for other_name, other_kind, other in known[:place]:
            comparable = kind == other_kind or BYTES in (tokenizer, other)
            if comparable and tokenizer != other:
                raise InputError(
                    f"tokens of different vocabularies: {other_name} is of {other}, "
                    f"and {name} of {tokenizer}",
                    hint="tokenize all texts with one tokenizer",
                )
