"""Read budgets from meshwright.toml or pyproject.toml, hold figures to them, and write what was.

    [budget."8b on 8 H100"]
    weigh = ["llama3-8b", "--on", "8xH100"]
    peak = { was = "48.3181 GiB", allow = "+1 %" }
    traffic = { fsdp = { was = "120.25 GiB", allow = "+1 %" } }
    fits = true

A budget file is data: nothing of it is run but what `weigh` names, as `meshwright weigh` runs it, without a
shell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.errors import InputError, nearest_name
from meshwright.extras import absent, not_installed
from meshwright.files import MOST_JSON_BYTES, parsed_toml, read_bytes, read_text, reason
from meshwright.units import parse_bytes

from ._difference import BYTES, FLOPS, SECONDS, amount_words
from ._figures import Figures

FILES = ("meshwright.toml", "pyproject.toml")
MOST_BUDGETS = 1000
KEYS = ("weigh", "peak", "flops", "traffic", "time", "fits")
UNITS = {"peak": BYTES, "flops": FLOPS, "time": SECONDS, "traffic": BYTES}
DEFAULTS = {"peak": "+1 %", "flops": "+0.1 %", "time": "+3 %"}
_NUMBER = re.compile(r"([0-9][0-9_,]{0,30}(?:\.[0-9]{1,20})?)\s*([A-Za-zµ%]{0,6})", re.ASCII)
_FLOP = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24}
_SECOND = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much one quantity may be: `was`, with what may be added; None if no figure was written yet.

    `name`: peak | flops | time | traffic.AXIS. `rounding`: half of the last decimal of `was`.
    """

    name: str
    was: float | None
    allow: str
    rounding: float = 0.0

    @property
    def unit(self) -> str:
        """Unit of the quantity."""
        return UNITS[self.name.partition(".")[0]]

    @property
    def most(self) -> float | None:
        """The most that is within the budget."""
        return (
            None if self.was is None else self.was + self.rounding + _allowed(self.allow, self.was, self.unit)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One table `[budget.NAME]`: what to weigh, and the limits that its figures keep."""

    name: str
    words: tuple[str, ...]
    limits: tuple[Limit, ...]
    fits: bool | None = None


def measured(figures: Figures, name: str) -> float | None:
    """Return a quantity of a weighing by its name in a budget; None if the weighing has none."""
    kind, _, axis = name.partition(".")
    if kind == "peak":
        return figures.num_bytes or None
    if kind == "flops":
        return figures.num_flops
    if kind == "time":
        return figures.step_seconds
    return sum(size for axes, size in figures.wire_bytes_by_axis.items() if axes == axis)


def budget_file(path: Path | None) -> Path:
    """Return the file of the budgets: the given one, or the first of `FILES` that has any.

    Raises:
        InputError: there is none.
    """
    if path is not None:
        return path
    if (found := found_file()) is not None:
        return found
    hint = 'make one: meshwright check --init "llama3-8b --on 8xH100"'
    raise InputError(f"no budgets in {' or '.join(FILES)} of {Path.cwd()}", hint=hint)


def found_file() -> Path | None:
    """Return the first of `FILES` in the working directory that has budgets; None if none has.

    Raises:
        InputError: one of them cannot be read.
    """
    paths = (Path(name) for name in FILES)
    return next((path for path in paths if path.is_file() and _tables(_parsed(path))), None)


def read_budgets(path: Path) -> tuple[Budget, ...]:
    """Return the budgets of a file, in its order.

    Raises:
        InputError: it cannot be read, has none, or one of them has a key or a value that is not understood.
    """
    tables = _tables(_parsed(path))
    if not tables:
        hint = 'add one: meshwright check --init "llama3-8b --on 8xH100"'
        raise InputError(f"{path} has no [budget.NAME]", hint=hint)
    if len(tables) > MOST_BUDGETS:
        raise InputError(f"{path} has {len(tables)} budgets", hint=f"use at most {MOST_BUDGETS}")
    return tuple(_budget(path, name, table) for name, table in tables.items())


def budget_text(path: Path) -> str:
    """Return the text of a file of budgets.

    Raises:
        InputError: it cannot be read, or is not TOML.
    """
    try:
        text = read_text(path)
        parsed_toml(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}", hint="write it as TOML") from error
    return text


def write_budgets(path: Path, text: str) -> None:
    """Write the text of a file of budgets completely or not at all, with the ends of lines that the file has.

    Raises:
        InputError: it cannot be written.
    """
    from meshwright.trainer.loop import write_whole

    place = path.resolve()  # what a link names
    is_there = place.is_file()
    is_windows = is_there and b"\r\n" in read_bytes(place, MOST_JSON_BYTES)
    try:
        mode = place.stat().st_mode if is_there else None
        write_whole(place, text.replace("\n", "\r\n") if is_windows else text)
        if mode is not None:
            place.chmod(mode & 0o777)
    except OSError as refused:
        hint = "it needs a folder that can be written, and room on its disk"
        raise InputError(f"cannot write {path}: {refused.strerror}", hint=hint) from refused


def _parsed(path: Path) -> dict[str, Any]:
    return parsed_toml(budget_text(path))


def _tables(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of budgets of a file: its own, or that of the tool in a pyproject.toml."""
    tool: Any = tree.get("tool")
    inner: Any = cast("dict[str, Any]", tool).get("meshwright") if isinstance(tool, dict) else None
    for place in (tree, inner):
        found: Any = cast("dict[str, Any]", place).get("budget") if isinstance(place, dict) else None
        if isinstance(found, dict) and found:
            return cast("dict[str, Any]", found)
    return {}


def _budget(path: Path, name: str, table: Any) -> Budget:
    where = f"{path}: budget {name!r}"
    if not isinstance(table, dict):
        raise InputError(f"{where} is no table", hint=f'write it as [budget."{name}"]')
    given = cast("dict[str, Any]", table)
    for key in given:
        if key not in KEYS:
            raise InputError(f"{where}: {key} is no key of a budget", hint=nearest_name(key, KEYS))
    words: Any = given.get("weigh")
    if not (
        isinstance(words, list) and words and all(isinstance(word, str) for word in cast("list[Any]", words))
    ):
        hint = 'write it as weigh = ["llama3-8b", "--on", "8xH100"]'
        raise InputError(f"{where}: weigh is no list of words", hint=hint)
    fits = given.get("fits")
    if fits is not None and not isinstance(fits, bool):
        raise InputError(f"{where}: fits = {fits!r}", hint="use true or false")
    return Budget(
        name=name, words=tuple(cast("list[str]", words)), limits=tuple(_limits(where, given)), fits=fits
    )


def _limits(where: str, given: Mapping[str, Any]) -> Iterator[Limit]:
    for key in ("peak", "flops", "time"):
        if key in given:
            yield _limit(where, key, given[key])
    axes = given.get("traffic", {})
    if not isinstance(axes, dict):
        raise InputError(f"{where}: traffic = {axes!r}", hint='write it as traffic = { fsdp = "+1 %" }')
    for axis, value in cast("dict[str, Any]", axes).items():
        yield _limit(where, f"traffic.{axis}", value)


def _limit(where: str, name: str, value: Any) -> Limit:
    """Return a limit: a table of `was` and `allow`, or the allowance alone."""
    kind, was = name.partition(".")[0], None
    fields = {"allow": value} if isinstance(value, str) else value
    hint = 'write it as { was = "48.3 GiB", allow = "+1 %" }' if kind != "time" else None
    hint = hint or 'write it as { was = "1.31 s", allow = "+3 %" }'
    if not isinstance(fields, dict) or not cast("dict[str, Any]", fields).keys() <= {"was", "allow"}:
        raise InputError(f"{where}: {name} = {value!r}", hint=hint)
    texts = {key: str(text) for key, text in cast("dict[str, Any]", fields).items()}
    allow = texts.get("allow", DEFAULTS.get(kind, "+1 %"))
    rounding = 0.0
    try:
        if "was" in texts:
            was, rounding = _amount(texts["was"], UNITS[kind])
        _allowed(allow, was or 0.0, UNITS[kind])
    except InputError as wrong:
        raise InputError(f"{where}: {name}: {wrong}", hint=hint) from wrong
    return Limit(name=name, was=was, allow=allow, rounding=rounding)


def _allowed(allow: str, was: float, unit: str) -> float:
    """Return how much more than `was` an allowance permits: "+1 %", "+500 MiB", "0".

    Raises:
        InputError: it is none of these.
    """
    text = allow.strip().removeprefix("+").strip()
    if text.endswith("%"):
        match = _NUMBER.fullmatch(text)
        if match is None or match[2] != "%":
            raise InputError(f"cannot read {allow[:40]!r} as a share", hint="write it as +1 %")
        return was * float(match[1].replace("_", "").replace(",", "")) / 100
    return 0.0 if text == "0" else _amount(text, unit)[0]


def _amount(text: str, unit: str) -> tuple[float, float]:
    """Return an amount in a unit, and half of its last written decimal.

    Raises:
        InputError: it is no amount of that unit.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or len(text) > 60:
        raise InputError(f"cannot read {text[:40]!r}", hint="write a number and its unit")
    digits = match[1].replace("_", "").replace(",", "")
    named = match[2]
    if unit == BYTES:
        scale = 1.0 if named in ("", "B") else float(parse_bytes(f"1{named}"))
    elif unit == FLOPS:
        prefix = re.sub(r"FLOPs?$", "", named)
        scale = _FLOP.get(prefix, math.nan)
    else:
        scale = _SECOND.get(named, math.nan)
    if math.isnan(scale):
        raise InputError(
            f"{text[:40]!r} is no amount of {unit}", hint="write it as 48.3 GiB, 4.50 PFLOP or 1.31 s"
        )
    decimals = len(digits.partition(".")[2])
    rounding = 0.5 * 10**-decimals * scale if decimals else 0.0  # a whole number is meant as it is
    return float(digits) * scale, rounding


def exact_words(amount: float, unit: str) -> str:
    """Return an amount with six digits, as `was` is written: "48.3181 GiB"."""
    if unit == BYTES:
        for name, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if amount >= size:
                return f"{amount / size:.6g} {name}"
        return f"{amount:.0f} B"
    if unit == SECONDS:
        scale, name = (1.0, "s") if amount >= 1 else (1e3, "ms") if amount >= 1e-3 else (1e6, "us")
        return f"{amount * scale:.6g} {name}"
    name, size = next(((n, s) for n, s in reversed(_FLOP.items()) if amount >= s), ("", 1.0))
    return f"{amount / size:.6g} {name}FLOP"


def updated_text(text: str, figures: Mapping[str, Figures]) -> str:
    """Return a budget file with the figures of today as `was`; comments, order and all else stay.

    Args:
        figures: by the names of their budgets. A budget without any limit gets all of them.

    >>> print(updated_text('[budget.a] # mine\\nweigh = ["x"]\\npeak = { allow = "0" }\\n', {}))
    [budget.a] # mine
    weigh = ["x"]
    peak = { allow = "0" }
    <BLANKLINE>
    """
    _need_tomlkit()
    import tomlkit

    document: Any = tomlkit.parse(text)
    place: Any = document if document.get("budget") or not figures else document["tool"]["meshwright"]
    for name, made in figures.items():
        table = place["budget"][name]
        if not {*table} & {"peak", "flops", "time", "traffic"}:
            for key, allow in DEFAULTS.items():
                if key != "time" or made.step_seconds is not None:
                    _set(table, key, allow, None)
            table["traffic"] = tomlkit.inline_table()
            for axis in made.wire_bytes_by_axis:
                _set(table["traffic"], axis, "+1 %", None)
            if made.fits is not None:
                table["fits"] = made.fits
        for key in ("peak", "flops", "time"):
            if key in table:
                _set(table, key, DEFAULTS[key], measured(made, key), UNITS[key])
        for axis in list(table.get("traffic", {})):
            _set(table["traffic"], axis, "+1 %", measured(made, f"traffic.{axis}"), BYTES)
    return tomlkit.dumps(document)


def _need_tomlkit() -> None:
    """Raise an `InputError` if the package that writes TOML is absent."""
    if missing := absent(("tomlkit",)):
        raise not_installed("check", missing, "writing figures into a file")


def _set(table: Any, key: str, allow: str, was: float | None, unit: str = BYTES) -> None:
    """Write `was` into a limit, and keep its allowance."""
    import tomlkit

    before: Any = table.get(key)
    kept = before.get("allow", allow) if isinstance(before, dict) else before or allow
    limit = tomlkit.inline_table()
    if was is not None:
        limit["was"] = exact_words(was, unit)
    limit["allow"] = str(kept)
    table[key] = limit


def with_new(text: str, name: str, words: tuple[str, ...]) -> str:
    """Return a budget file with one more budget at its end, without figures.

    Raises:
        InputError: the text has a budget of that name, or keeps its budgets in a way to which tomlkit can add
            none.
    """
    _need_tomlkit()
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    wanted = parsed_toml(text)
    is_tool = not wanted.get("budget") and bool({"tool", "project", "build-system"} & wanted.keys())
    keys = ("tool", "meshwright", "budget") if is_tool else ("budget",)
    table = tomlkit.table()
    table["weigh"] = list(words)
    try:
        place: Any = tomlkit.parse(text)
        document, inner = place, wanted
        for key in keys:
            if key not in place:
                place[key] = tomlkit.table(is_super_table=True)
            place, inner = place[key], inner.setdefault(key, {})
        if name in inner:
            raise InputError(f"there is a budget {name!r} already", hint="renew its figures: --update")
        place[name] = table
        inner[name] = {"weigh": list(words)}
        made = tomlkit.dumps(document)
        is_added = parsed_toml(made) == wanted
    except (TOMLKitError, ValueError, TypeError, AttributeError):  # no table, or one within a line
        is_added, made = False, ""
    if not is_added:
        what = f"no budget can be added to the table {'.'.join(keys)} as it is written"
        raise InputError(what, hint=f'write its budgets as tables of their own: [{".".join(keys)}."NAME"]')
    return made


def limit_words(limit: Limit, now: float | None) -> str:
    """Return a figure next to its limit: "49.1 GiB, was 48.3 GiB (+1.7 %, +1 % allowed)"."""
    if now is None:
        return "is not known"
    words = amount_words(now, limit.unit)
    if limit.was is None:
        return f"{words}, without a figure to compare with"
    change = f"{100 * (now - limit.was) / limit.was:+.3g} %" if limit.was else "was 0"
    return f"{words}, was {amount_words(limit.was, limit.unit)} ({change}; {limit.allow} allowed)"
