"""Say why XLA did not compile a program: it does not fit a device's memory, or anything else.

Used by: the module that serves requests, and the one that compiles lowered calls.
"""

from __future__ import annotations

from meshwright.compiler import figures_of
from meshwright.errors import CompileError


class OutOfMemory(CompileError):
    """A device has too little memory for a program. `figures`: bytes needed and usable."""

    def __init__(self, message: str, words: str, figures: tuple[int, int]) -> None:
        super().__init__(message, hint="weigh it with a smaller batch, or on more devices")
        self.words, self.figures = words, figures


def could_not_compile(what: str, failed: Exception) -> CompileError:
    """Return the error for a compilation that failed.

    Args:
        what: the program, and perhaps its fleet.
        failed: what the compiler raised.
    """
    words = str(failed)
    message = f"XLA could not compile {what}: {words}"
    if (figures := figures_of(words)) is not None:
        return OutOfMemory(message, words.partition("\n")[0], figures)
    hint = "the compiler's words are above; `meshwright doctor` shows the versions in use"
    return CompileError(message, hint=hint)
