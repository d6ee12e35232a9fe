"""Say which layers a Transformer has: the kind of each, and the stretches in which kinds take turns.

A pattern is words with spaces between them, one for each layer, and is repeated: "delta+experts*3
attention+experts" is three layers of a gated delta net and one of attention, each with experts. A word has
the layer's mixer, its MLP, or both with a plus between them.

Layers are stacked and run in a loop, so a list that does not repeat as a whole is cut into stretches that do:
those with the fewest blocks to compile.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIXERS = ("attention", "local", "nope", "delta", "mamba")
"""Words for a mixer; `local` is attention with a window, `nope` attention without positions."""
MLPS = ("mlp", "experts")
MOST_LISTED = 512
"""The most layers of a pattern, before it repeats."""
LAYERS, FIRST_LAYERS = "layers", "dense_layers"
GLOBAL_ATTENTION = "global_attention"
"""The attention of layers that see all positions, where it has other sizes than that of the others."""


class LayerKind(NamedTuple):
    """The parts of a layer: `mixer` is "attention", "delta", "mamba" or None, `mlp` "mlp", "experts" or None.

    `window` and `has_positions` are attention's.
    """

    mixer: str | None
    mlp: str | None
    window: int | None = None
    has_positions: bool = True


@dataclass(frozen=True, slots=True)
class Stretch:
    """Layers of which every `len(period)` are alike.

    `name`: of their parameters. `first`: the number of layers before them.
    """

    name: str
    period: tuple[LayerKind, ...]
    num_layers: int
    first: int

    @property
    def kinds(self) -> Iterator[LayerKind]:
        """The kind of each layer."""
        return (self.period[layer % len(self.period)] for layer in range(self.num_layers))

    def count(self, *, mixer: str | None = None, mlp: str | None = None) -> int:
        """Return the number of layers with this mixer, or with this MLP."""
        whole, rest = divmod(self.num_layers, len(self.period))

        def among(kinds: Sequence[LayerKind]) -> int:
            return sum((mixer is None or k.mixer == mixer) and (mlp is None or k.mlp == mlp) for k in kinds)

        return whole * among(self.period) + among(self.period[:rest])


def holds_layers(name: str) -> bool:
    """Return whether a group of parameters is a stretch's: stacked layers, or a list of unrolled ones."""
    return name in (LAYERS, FIRST_LAYERS) or name.startswith(f"{LAYERS}_")


def words_of(pattern: str) -> tuple[str, ...]:
    """Return the word of each layer of a pattern.

    Raises:
        ValueError: what is wrong with it.

    >>> words_of("delta+experts*2 attention")
    ('delta+experts', 'delta+experts', 'attention')
    """
    words = list[str]()
    for item in pattern.split():
        word, _, times = item.partition("*")
        parts = word.split("+")
        of_layer = [part for part in parts if part in MIXERS], [part for part in parts if part in MLPS]
        if not (re.fullmatch(r"[^*]+(\*[1-9][0-9]{0,2})?", item) and [*of_layer[0], *of_layer[1]] == parts):
            raise ValueError(f"{item!r} is no layer")
        if any(len(each) > 1 for each in of_layer):
            raise ValueError(f"{item!r} has two mixers or two MLPs")
        words += [word] * int(times or 1)
        if len(words) > MOST_LISTED:
            raise ValueError(f"more than {MOST_LISTED} layers are listed")
    return tuple(words)


def pattern_of(words: Sequence[str]) -> str:
    """Return the shortest pattern that gives the words of all layers.

    >>> pattern_of(["mamba", "mamba", "attention+mlp"] * 4)
    'mamba*2 attention+mlp'
    """
    size = next(p for p in range(1, len(words) + 1) if _repeats(words, p))
    runs = list[tuple[str, int]]()
    for word in words[:size]:
        if runs and runs[-1][0] == word:
            runs[-1] = word, runs[-1][1] + 1
        else:
            runs.append((word, 1))
    return " ".join(word if times == 1 else f"{word}*{times}" for word, times in runs)


def _repeats(items: Sequence[object], size: int) -> bool:
    return len(items) % size == 0 and all(items[i] == items[i % size] for i in range(len(items)))


def kind_of(word: str, window: int | None) -> LayerKind:
    """Return the kind of a layer by its word in a pattern, where layers with a window have `window`."""
    parts = word.split("+")
    mixer = next((part for part in parts if part in MIXERS), None)
    mlp = next((part for part in parts if part in MLPS), None)
    if mixer in ("local", "nope"):
        return LayerKind("attention", mlp, window if mixer == "local" else None, mixer != "nope")
    return LayerKind(mixer, mlp)


def word_of(kind: LayerKind) -> str:
    """Return the word of a kind of layer in a pattern.

    >>> word_of(LayerKind("attention", "experts", window=128))
    'local+experts'
    """
    mixer = "local" if kind.window is not None else kind.mixer if kind.has_positions else "nope"
    return "+".join(part for part in (mixer, kind.mlp) if part is not None)


@functools.lru_cache(maxsize=64)
def stretches_of(kinds: tuple[LayerKind, ...], num_layers: int) -> tuple[Stretch, ...]:
    """Return the stretches of `num_layers` layers, whose kinds are `kinds` and then again.

    One stretch is named `LAYERS`. Of two the first is `FIRST_LAYERS` if it has no experts and the second has,
    as in DeepSeek's models. Otherwise they are numbered.
    """
    size = next(p for p in range(1, len(kinds) + 1) if _repeats(kinds, p))
    if num_layers >= 2 * size:
        return (Stretch(LAYERS, kinds[:size], num_layers, 0),)
    cuts = _fewest_blocks(kinds[:num_layers])
    names = [f"{LAYERS}_{place}" for place in range(len(cuts))]
    if len(cuts) == 1:
        names = [LAYERS]
    elif len(cuts) == 2 and [_has_experts(period) for period, _, _ in cuts] == [False, True]:
        names = [FIRST_LAYERS, LAYERS]
    return tuple(Stretch(name, *cut) for name, cut in zip(names, cuts, strict=True))


def _has_experts(period: tuple[LayerKind, ...]) -> bool:
    return any(kind.mlp == "experts" for kind in period)


def _fewest_blocks(kinds: tuple[LayerKind, ...]) -> list[tuple[tuple[LayerKind, ...], int, int]]:
    """Return period, number of layers and number of layers before, of stretches that are all of `kinds`.

    Their periods have the fewest layers together; of equals, there are the fewest stretches.
    """
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]  # blocks, stretches, begin of the last, its period
    best += [(len(kinds) + 1, 0, 0, 0)] * len(kinds)
    for begin in range(len(kinds)):
        blocks, stretches, *_ = best[begin]
        for period in range(1, len(kinds) - begin + 1):
            end = begin + period
            while end <= len(kinds):
                best[end] = min(best[end], (blocks + period, stretches + 1, begin, period))
                if kinds[end : end + period] != kinds[begin : begin + period]:
                    break
                end += period
    found, end = list[tuple[tuple[LayerKind, ...], int, int]](), len(kinds)
    while end:
        _, _, begin, period = best[end]
        found.insert(0, (kinds[begin : begin + period], end - begin, begin))
        end = begin
    return found
