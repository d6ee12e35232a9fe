"""Which document each token of a window belongs to."""

from __future__ import annotations

import numpy as np


def segments_of(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """The number of each token's document within its window, from 0; int32, shaped as `tokens`.

    Args:
        tokens: [windows, positions]. An id `end_of_document` is its document's last token; a window
            may begin and end inside a document.
    """
    segments = np.zeros(tokens.shape, np.int32)
    np.cumsum(tokens[:, :-1] == end_of_document, axis=1, dtype=np.int32, out=segments[:, 1:])
    return segments
