"""Find the line of the user's own source that an operation of PyTorch runs for."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch

_OURS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), "<")
"""Where sources begin that are not the user's: this package, PyTorch, and code without a file."""
_STEP = str(Path(__file__).with_name("_eager_step.py"))
"""What runs the step: outside of it is whoever weighs."""


def line_at_work() -> str:
    """Return the innermost line outside PyTorch that runs now ("model.py:25").

    A library's model counts as the user's. The backward pass, which runs no line of Python, has "".
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _STEP:
        if _is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _is_users(file: str) -> bool:
    return not file.startswith(_OURS)
