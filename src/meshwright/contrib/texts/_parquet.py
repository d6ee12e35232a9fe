"""Read the texts of a column of a Parquet file, through the package `pyarrow`, which is imported only then.

A range of a file's bytes stands for the groups of rows that begin in it. Where a group begins is counted from
the compressed sizes of the groups before it, so that each group is in one range and none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, nearest_name
from meshwright.extras import how_to_install

PARQUET = ".parquet"
_ROWS_AT_ONCE = 1024


def parquet_texts(path: Path, start: int, stop: int, column: str) -> Iterator[str]:
    """Yield the texts of the groups of rows that begin in bytes `start` to `stop`, in order.

    Raises:
        InputError: `pyarrow` is not installed, the file is no Parquet file or is damaged, it has no such
            column, the column holds no text, or a row has none.
    """
    arrow, parquet = _packages(path)
    try:
        file = parquet.ParquetFile(path)  # of a regular file: `_texts` has looked
    except (arrow.ArrowException, OSError) as wrong:
        raise _unreadable(path, wrong) from wrong
    with file:
        _check_column(path, file.schema_arrow, column, arrow)
        row = 0
        begins = 4  # the magic number
        for group in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(group)
            if start <= begins < stop:
                yield from _group(path, file, group, column, row, arrow)
            row += about.num_rows
            begins += sum(about.column(each).total_compressed_size for each in range(about.num_columns))


def text_columns(path: Path) -> list[str]:
    """Return the columns of a file that hold text.

    Raises:
        InputError: `pyarrow` is not installed, or the file is no Parquet file.
    """
    arrow, parquet = _packages(path)
    try:
        schema = parquet.read_schema(path)
    except (arrow.ArrowException, OSError) as wrong:
        raise _unreadable(path, wrong) from wrong
    return [name for name in schema.names if _is_text(schema.field(name).type, arrow)]


def _is_text(kind: Any, arrow: Any) -> bool:
    inner = kind.value_type if arrow.types.is_dictionary(kind) else kind
    return any(is_text(inner) for is_text in (arrow.types.is_string, arrow.types.is_large_string))


def _packages(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]  # optional
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise InputError(
            f"{path}: reading Parquet needs the package pyarrow, which is not installed",
            hint=f"{how_to_install('parquet')}, or convert it to .jsonl",
        ) from missing
    return pyarrow, pyarrow.parquet


def _unreadable(path: Path, wrong: Exception) -> Exception:
    """Return the error in words; one of the disk, which has a number, is the caller's to explain."""
    if isinstance(wrong, OSError) and wrong.errno is not None:
        return wrong
    return InputError(f"{path} is no whole Parquet file: {wrong}", hint="copy it again, or name another file")


def _check_column(path: Path, schema: Any, column: str, arrow: Any) -> None:
    if (number := schema.names.count(column)) > 1:
        raise InputError(
            f"{path}: {number} columns are called {column!r}",
            hint="write the file again with one of them, or name another with --text-key",
        )
    if column not in schema.names:
        raise InputError(
            f"{path}: no column {column!r}",
            hint=f"{nearest_name(column, schema.names)} --text-key names the column of the text",
        )
    kind = schema.field(column).type
    if not _is_text(kind, arrow):
        raise InputError(
            f"{path}: column {column!r} holds {kind}, not text",
            hint="--text-key names the column of the text",
        )


def _group(path: Path, file: Any, group: int, column: str, row: int, arrow: Any) -> Iterator[str]:
    try:
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[column]):
            for text in batch.column(0).to_pylist():
                if text is None:
                    raise InputError(
                        f"{path}: row {row} has no {column!r}", hint="take the row out, or give it a text"
                    )
                yield text
                row += 1
    except UnicodeDecodeError as wrong:
        raise InputError(f"{path}: row {row} is not UTF-8: {wrong.reason}", hint="convert it") from wrong
    except (arrow.ArrowException, OSError) as wrong:
        raise _unreadable(path, wrong) from wrong
