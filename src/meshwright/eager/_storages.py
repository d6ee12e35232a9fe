"""Which storages live, what they hold, and the most that lived at once. No torch is imported.

A storage is counted once, by its exact bytes, from the operation that makes it until it is freed; what a
kernel takes and gives back inside one operation is not seen. CUDA's allocator rounds each up to 512 bytes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

TEMPORARY = "temporaries"
SAVED = "saved activations"
CATEGORIES = ("parameters", "buffers", "gradients", "optimizer state", "inputs", SAVED, TEMPORARY)


class _Storage:
    __slots__ = ("category", "format", "num_bytes", "reference", "saved_times")

    def __init__(self, reference: Any, num_bytes: int, number_format: str) -> None:
        self.reference = reference
        self.num_bytes = num_bytes
        self.format = number_format
        self.category = TEMPORARY
        self.saved_times = 0

    @property
    def counts_as(self) -> str:
        return SAVED if self.category == TEMPORARY and self.saved_times else self.category


class Storages:
    """All storages met; `live` bytes by category, and `at_peak` the same at the fullest instant."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}
        self.peak_phase = ""
        self._storages: dict[int, _Storage] = {}

    def see(self, tensor: Any, number_format: str) -> None:
        """Meet a tensor; a storage that grew or shrank is counted anew."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, lambda _: self._freed(key))
            known = self._storages[key] = _Storage(reference, 0, number_format)
        if known.num_bytes != num_bytes:
            self._add(known, num_bytes - known.num_bytes)
            known.num_bytes = num_bytes

    def put(self, tensor: Any, category: str, number_format: str) -> None:
        """Say what a tensor's storage holds; what it was said to hold before stays where it is known."""
        self.see(tensor, number_format)
        known = self._storages[tensor.untyped_storage()._cdata]
        if known.category == TEMPORARY:
            self._change(known, category=category)
            known.format = number_format

    def save(self, tensor: Any, number_format: str) -> int:
        """Note that the forward pass keeps it for the backward pass; `release` takes the number returned."""
        self.see(tensor, number_format)
        key = tensor.untyped_storage()._cdata
        self._change(self._storages[key], saved=1)
        return key

    def release(self, key: int) -> None:
        """Undo one `save`."""
        if key in self._storages:
            self._change(self._storages[key], saved=-1)

    def is_new(self, tensor: Any) -> bool:
        """Whether its storage is neither known nor of a category."""
        return tensor.untyped_storage()._cdata not in self._storages

    def note_peak(self, phase: str) -> None:
        """Compare what lives now with the most so far."""
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak, self.peak_phase = self.live_bytes, dict(self.live), phase

    def add_to_peak(self, category: str) -> None:
        """Make the peak so far one at which all that is now of `category` lived already."""
        more = self.live[category] - self.at_peak.get(category, 0)
        self.peak_bytes += more
        self.at_peak[category] = self.live[category]

    def by_format(self) -> dict[str, dict[str, int]]:
        """Live bytes of each category by number format, temporaries left out."""
        found: dict[str, dict[str, int]] = {}
        for storage in self._storages.values():
            if storage.counts_as != TEMPORARY and storage.num_bytes:
                formats = found.setdefault(storage.counts_as, {})
                formats[storage.format] = formats.get(storage.format, 0) + storage.num_bytes
        return found

    def _add(self, known: _Storage, num_bytes: int) -> None:
        self.live[known.counts_as] += num_bytes
        self.live_bytes += num_bytes

    def _change(self, known: _Storage, *, category: str | None = None, saved: int = 0) -> None:
        self._add(known, -known.num_bytes)
        known.category = category or known.category
        known.saved_times += saved
        self._add(known, known.num_bytes)

    def _freed(self, key: int) -> None:
        known = self._storages.pop(key)
        self._add(known, -known.num_bytes)
