"""Mix several sources of tokens by weight, in an order that is computed and not stored.

The sequences of a run come in cycles of 65,536. In each cycle a source has a fixed number of places, its
share rounded to a whole number of them, and the cycle's places are permuted. So any step is found in the same
time, the shares are exact after each cycle, and nothing depends on the number of processes. The k-th place of
a source takes the k-th window of that source's own order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.errors import InputError
from meshwright.trainer.data import ALL, Rows, SourceEpochs, Split, TokenWindows, entropy_nats, windows_at

CYCLE = 1 << 16


def cycle_counts(name: str, weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many of a cycle's sequences each source has; they sum to `CYCLE`.

    Raises:
        InputError: a source would have none.
    """
    exact = [weight / sum(weights) * CYCLE for weight in weights]
    counts = [math.floor(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda each: (counts[each] - exact[each], each))
    for each in by_rest[: CYCLE - sum(counts)]:
        counts[each] += 1
    if 0 in counts:
        number = counts.index(0)
        raise InputError(
            f"{name}: source {number + 1} has weight {weights[number]:g} of {sum(weights):g}, less than one "
            f"sequence of {CYCLE}",
            hint="raise its weight, or leave it out",
        )
    return tuple(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedWindows:
    """Windows of several sources; `counts`: how many of each `CYCLE` sequences a source has."""

    sources: tuple[TokenWindows, ...]
    counts: tuple[int, ...]
    seed: int
    sequences: int

    @property
    def is_bytes(self) -> bool:
        """True if all tokens are the bytes of UTF-8 text."""
        return all(source.is_bytes for source in self.sources)

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return what `TokenWindows.batch` returns, each row from one of the sources; raises as that does."""
        which, places = self._places(step * self.sequences, self.sequences, split)
        starts, chosen = np.empty(self.sequences, np.int64), np.arange(self.sequences)[rows]
        parts: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        for number, source in enumerate(self.sources):
            if not (of_batch := np.flatnonzero(which == number)).size:
                continue
            starts[of_batch] = source.starts(step, split, of_batch, int(places[of_batch[0]]))
            if (mine := np.flatnonzero(which[chosen] == number)).size:
                parts.append((mine, source.windows(split, starts[chosen[mine]])))
        length = self.sources[0].sequence_length + 1
        names = parts[0][1] if parts else {}
        batch = {name: np.empty((len(chosen), length), np.int32) for name in names}
        for mine, part in parts:
            for name, values in part.items():
                batch[name][mine] = values
        return batch

    def _places(self, first: int, count: int, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence from `first` on, and its index within that source."""
        which, places = np.empty(count, np.int64), np.empty(count, np.int64)
        for cycle, begin, stop in _cycles(first, count):
            sources, ranks = _cycle(cycle, self.counts, self.seed, split)
            here = slice(max(first, cycle * CYCLE) - first, min(first + count, (cycle + 1) * CYCLE) - first)
            which[here] = sources[begin:stop]
            places[here] = cycle * np.array(self.counts)[sources[begin:stop]] + ranks[begin:stop]
        return which, places

    def epochs(self, steps: int) -> tuple[SourceEpochs, ...]:
        """Return what a run of `steps` reads of each source."""
        num_sequences = steps * self.sequences
        cycles, rest = divmod(num_sequences, CYCLE)
        last = np.bincount(
            _cycle(cycles, self.counts, self.seed, "train")[0][:rest], minlength=len(self.counts)
        )
        read = [cycles * count + more for count, more in zip(self.counts, last.tolist(), strict=True)]
        shares = [count / CYCLE for count in self.counts]
        return tuple(
            source.epochs_of(count, share)
            for source, count, share in zip(self.sources, read, shares, strict=True)
        )

    def unigram_entropy_nats(self, split: Split) -> float:
        """Return the entropy of single tokens of the mixture in nats per token; reads each split whole."""
        weighted = zip(self.sources, self.counts, strict=True)
        shares = [source.unigram_shares(split) * (count / CYCLE) for source, count in weighted]
        return entropy_nats(np.sum(shares, axis=0))

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of byte tokens, or else the ids."""
        return next((source for source in self.sources if not source.is_bytes), self.sources[0]).decode(
            tokens
        )


def _cycles(first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield each cycle that `count` sequences from `first` touch, with the range within it."""
    for cycle in range(first // CYCLE, (first + count - 1) // CYCLE + 1):
        yield cycle, max(first - cycle * CYCLE, 0), min(first + count - cycle * CYCLE, CYCLE)


@functools.lru_cache(maxsize=4)
def _cycle(cycle: int, counts: tuple[int, ...], seed: int, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each slot in a cycle, and its index among that source's slots."""
    permuted = windows_at(cycle * CYCLE, CYCLE, size=CYCLE, seed=seed + (1 << 62), split=split)
    sources = np.searchsorted(np.cumsum(counts), permuted, side="right")
    ranks = np.empty(CYCLE, np.int64)
    for number, count in enumerate(counts):
        ranks[sources == number] = np.arange(count)
    return sources, ranks
