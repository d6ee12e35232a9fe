"""Send results to stdout and messages to stderr, with colour and progress only on a terminal.

This module also holds the checks on arguments and streams that all commands share.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from meshwright.errors import MeshwrightError, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

    from meshwright.reportable import Reportable


SIGNAL_BASE = 128  # with it the shell reports the signal that ended a command
EXIT_INTERRUPTED = SIGNAL_BASE + signal.SIGINT
PIPE_WIDTH = 100  # columns if no terminal reports its width
WIDTHS = range(20, 1001)  # columns in which tables can be drawn; `COLUMNS` outside this range is ignored

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else.")]


class _OutputStream:
    """Wrap a standard stream so that its failures raise no `OSError`.

    After a failed write the rest is dropped. If the reader has gone (`| head -1`), the command continues and
    keeps its exit status. Any other failure on stdout raises a `MeshwrightError`. On stderr it is dropped
    too, because no place is left to report it.
    """

    def __init__(self, stream: TextIO, *, is_answer: bool) -> None:
        self._stream = stream
        self._is_answer = is_answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, and return its number of characters."""
        with self._failing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text."""
        with self._failing():
            self._stream.flush()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as refused:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # Python flushes once more at exit
            os.close(nowhere)
            if self._is_answer and not isinstance(refused, BrokenPipeError):
                raise MeshwrightError(
                    f"the answer cannot be written to stdout: {refused.strerror}",
                    hint="send stdout to a terminal, a pipe, or a file on a disk with room",
                ) from refused


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make stdout and stderr usable by the command, even if closed, full, not UTF-8 or zero columns wide."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:  # closed: the next opened file would get its number, and the output
            os.dup2(os.open(os.devnull, flags), number)  # writing to stdout then fails, as it should
    before = sys.stdout, sys.stderr
    output, messages = (_opened(stream, number) for number, stream in enumerate(before, start=1))
    sys.stdout, sys.stderr = _OutputStream(output, is_answer=True), _OutputStream(messages, is_answer=False)
    for name in ("COLUMNS", "TERMINAL_WIDTH"):  # rich and typer do not check them
        width = os.environ.get(name, "")
        if not (width.isdecimal() and len(width) < 9 and int(width) in WIDTHS):
            os.environ.pop(name, None)
    try:
        yield
    finally:
        with suppress(MeshwrightError):  # already reported
            sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _opened(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream that replaces what its encoding lacks; a new one if Python found it closed."""
    if stream is None:
        stream = open(number, "w", closefd=False)  # noqa: SIM115
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")
    return stream


def console(*, stderr: bool) -> Console:
    """Return a console for results or for messages, as wide as its terminal.

    It does not interpret markup, and it prints control characters in escaped form.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Cleaned(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Cleaned(stderr=stderr, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def show(*parts: RenderableType) -> None:
    """Print results for a person."""
    console(stderr=False).print(*parts, sep="\n")


def say(line: str) -> None:
    """Print a line as it is, however wide the terminal."""
    print(line)


def print_json(answer: object) -> None:
    """Print results as JSON, and nothing else."""
    print(json.dumps(answer, indent=2, allow_nan=False))


def answer(
    as_json: bool, fields: object, page: Callable[[], RenderableType | tuple[RenderableType, ...]]
) -> None:
    """Print a command's result: its fields as JSON, or for a person the parts that `page` returns."""
    if as_json:
        print_json(fields)
        return
    parts = page()
    show(*parts if isinstance(parts, tuple) else (parts,))


def answer_with(result: Reportable, as_json: bool, html: Path | None = None, **says: Any) -> None:
    """Print a command's result, as JSON or for a person, and write its page if a file is named.

    Args:
        says: of `renderable`.
    """
    if html is not None:
        result.to_html(html)
    if as_json:
        print_json(result.to_dict())
        return
    from meshwright.report import renderable

    show(renderable(result, **says))


def say_readings(config: str | None, on: str, layout: str | None, other: str = "") -> None:
    """Print on stderr how aliases of chips and axes are read, and another note; nothing if there are none.

    Raises:
        InputError: the fleet or the layout cannot be read.
    """
    from meshwright.config import layout_reading, text_reading
    from meshwright.hardware import fleet_reading, split_reserve

    if split_reserve(on)[0] != "local" and (reading := fleet_reading(on)):
        print(f"note: {reading}", file=sys.stderr)
    is_foreign = config is not None and ":" in config and not Path(config).exists()
    if layout is not None and not is_foreign and (reading := layout_reading(layout)):
        print(f"note: {reading}", file=sys.stderr)
    if config is not None and not is_foreign and (reading := text_reading(config)):
        print(f"note: {reading}", file=sys.stderr)
    if other:
        print(f"note: {other}", file=sys.stderr)


def complete_config(incomplete: str) -> list[str]:
    """Return the presets, files and runs whose names begin with `incomplete`, for shell completion."""
    from meshwright.config import model_room, preset_names

    there = [*Path().glob("*.toml"), *Path("runs").glob("*")]
    known = (*preset_names(), *model_room().published_ids(), *map(str, there))
    return [name for name in known if name.startswith(incomplete)]


@contextmanager
def phases(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with the phase and the elapsed time, and yield a function that names the phase."""
    with bar(what) as update:
        yield lambda phase: update(description=f"{what}: {phase}")


@contextmanager
def bar(what: str, *, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show progress on stderr, and yield a function that updates it; in a pipe, show nothing.

    Args:
        of_bytes: show a bar of the bytes done in place of a spinner.

    The function takes what `rich.progress.Progress.update` takes: `description`, `completed`, `total`.
    """
    if not sys.stderr.isatty():
        yield lambda **state: None
        return
    from rich import progress as rich

    words = rich.TextColumn("{task.description}", markup=False)
    columns = (rich.SpinnerColumn(), words, rich.TimeElapsedColumn())
    if of_bytes:
        columns = (words, rich.BarColumn(), rich.DownloadColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console(stderr=True), transient=True) as progress:
        yield partial(progress.update, progress.add_task(what, total=None))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """Return a rich table in the style of all commands; columns named in `right` hold numbers.

    Cells are text, not markup: "[tensor]" stays as it is.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        # The first column holds names; a name broken over lines cannot be copied.
        justify = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=place == 0)
    for cells in rows:
        made.add_row(*map(Text, cells))
    return made
