"""Read the plain data of a pickle without unpickling it: nothing is imported, called or built.

Numbers, texts, bytes, None, lists, tuples and dicts are read, by the opcodes that Python writes for them in
protocols 2 to 5. All others refuse the file, by name: a pickle with them can run any code. There
are limits on a file's bytes, objects, open lists and digits.
"""

from __future__ import annotations

import pickletools
import struct
from typing import Any

MOST_OBJECTS = 20_000_000
MOST_MARKS = 1000  # lists and dicts that are begun and not finished
MOST_INTEGER_BYTES = 16
_NAMES = {ord(each.code): each.name for each in pickletools.opcodes}
_TEXT_PAIR = ("GLOBAL", "INST")
_Value = Any


class NotPlain(ValueError):
    """A pickle that is not plain data, in words that follow a colon."""


def plain_pickle(content: bytes) -> _Value:
    """Return the value of a pickle of plain data.

    Raises:
        NotPlain: an opcode is not of plain data, the file ends early, or a limit is passed.

    >>> import pickle
    >>> plain_pickle(pickle.dumps({"a": [1, (2.5, None)]}))
    {'a': [1, (2.5, None)]}
    >>> plain_pickle(pickle.dumps(print))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    NotPlain: byte 30 is STACK_GLOBAL, which would run code (builtins.print)
    """
    reader = _Reader(content)
    try:
        return reader.read()
    except (IndexError, struct.error):
        raise NotPlain(f"it ends within an opcode, at byte {reader.place:,} of {len(content):,}") from None


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content, self.place, self.most = content, 0, MOST_OBJECTS
        self.stack: list[_Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, _Value] = {}

    def read(self) -> _Value:
        """Run the opcodes to STOP."""
        content, stack, handlers, num_objects = self.content, self.stack, _HANDLERS, 0
        while True:
            code = content[self.place]
            self.place += 1
            if code == STOP:
                break
            handler = handlers.get(code)
            if handler is None:
                raise self._refused(code)
            handler(self)
            num_objects += 1
            if num_objects > self.most:
                raise NotPlain(f"it has more than {self.most:,} opcodes")
        if len(stack) != 1 or self.marks:
            raise NotPlain(f"it ends with {len(stack)} values on its stack")
        return stack[0]

    def _refused(self, code: int) -> NotPlain:
        at, name = self.place - 1, _NAMES.get(code)
        if name is None:
            return NotPlain(f"byte {at:,} is no opcode: {code:#04x}")
        what = ""
        if name in _TEXT_PAIR:
            pair = self.content[self.place : self.place + 200].split(b"\n")[:2]
            what = ".".join(each.decode("utf-8", "replace")[:80] for each in pair)
        elif name == "STACK_GLOBAL":
            what = ".".join(str(each)[:80] for each in self.stack[-2:] if isinstance(each, str))
        return NotPlain(f"byte {at:,} is {name}, which would run code{f' ({what})' if what else ''}")

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        end = self.place + length
        if length < 0 or end > len(self.content):
            raise NotPlain(f"it ends within a text of {length:,} bytes, at byte {self.place:,}")
        taken = self.content[self.place : end]
        self.place = end
        return taken

    def number(self, layout: struct.Struct) -> Any:
        """Return the next number of a fixed width."""
        (value,) = layout.unpack_from(self.content, self.place)
        self.place += layout.size
        return value

    def since_mark(self) -> list[_Value]:
        """Take what is above the last mark."""
        if not self.marks:
            raise NotPlain(f"byte {self.place - 1:,} closes a list that was not begun")
        start = self.marks.pop()
        if start > len(self.stack):
            raise NotPlain(f"byte {self.place - 1:,} closes a list below its beginning")
        taken = self.stack[start:]
        del self.stack[start:]
        return taken


_U8, _U16, _U32, _U64 = (struct.Struct(f"<{kind}") for kind in "BHIQ")
_I32, _DOUBLE = struct.Struct("<i"), struct.Struct(">d")
STOP = ord(".")


def _mark(reader: _Reader) -> None:
    if len(reader.marks) >= MOST_MARKS:
        raise NotPlain(f"it is nested more than {MOST_MARKS} levels deep")
    reader.marks.append(len(reader.stack))


def _push(value: _Value) -> Any:
    return lambda reader: reader.stack.append(value)


def _fixed(layout: struct.Struct) -> Any:
    return lambda reader: reader.stack.append(reader.number(layout))


def _long(layout: struct.Struct) -> Any:
    def read(reader: _Reader) -> None:
        length = reader.number(layout)
        if length > MOST_INTEGER_BYTES:
            raise NotPlain(f"an integer has {length:,} bytes, and {MOST_INTEGER_BYTES} are read")
        reader.stack.append(int.from_bytes(reader.take(length), "little", signed=True))

    return read


def _text(layout: struct.Struct) -> Any:
    return lambda reader: reader.stack.append(reader.take(reader.number(layout)).decode("utf-8", "replace"))


def _bytes(layout: struct.Struct) -> Any:
    return lambda reader: reader.stack.append(reader.take(reader.number(layout)))


def _tuple_of(count: int) -> Any:
    def make(reader: _Reader) -> None:
        if len(reader.stack) < count:
            raise NotPlain(f"byte {reader.place - 1:,} takes {count} values where there are fewer")
        taken = tuple(reader.stack[len(reader.stack) - count :])
        del reader.stack[len(reader.stack) - count :]
        reader.stack.append(taken)

    return make


def _append(reader: _Reader) -> None:
    value = reader.stack.pop()
    _extend(reader, [value])


def _extend(reader: _Reader, values: list[_Value]) -> None:
    target = reader.stack[-1]
    if type(target) is not list:
        raise NotPlain(f"byte {reader.place - 1:,} appends to {type(target).__name__}, which is no list")
    target.extend(values)


def _set(reader: _Reader, pairs: list[_Value]) -> None:
    target = reader.stack[-1]
    if type(target) is not dict or len(pairs) % 2:
        raise NotPlain(f"byte {reader.place - 1:,} sets items of {type(target).__name__}")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if type(key) not in (str, int):
            raise NotPlain(f"a key is {type(key).__name__}, and texts and whole numbers are read")
        target[key] = value


def _setitem(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _set(reader, [key, value])


def _put(layout: struct.Struct | None) -> Any:
    def put(reader: _Reader) -> None:
        key = len(reader.memo) if layout is None else reader.number(layout)
        reader.memo[key] = reader.stack[-1]

    return put


def _get(layout: struct.Struct) -> Any:
    def get(reader: _Reader) -> None:
        key = reader.number(layout)
        if key not in reader.memo:
            raise NotPlain(f"byte {reader.place - 1:,} names value {key:,}, which was not kept")
        reader.stack.append(reader.memo[key])

    return get


def _new(kind: type) -> Any:
    return lambda reader: reader.stack.append(kind())


def _skip(length: int) -> Any:
    return lambda reader: reader.take(length)


_BY_NAME: dict[str, Any] = {
    "PROTO": _skip(1), "FRAME": _skip(8), "MARK": _mark,
    "NONE": _push(None), "NEWTRUE": _push(True), "NEWFALSE": _push(False),
    "BININT": _fixed(_I32), "BININT1": _fixed(_U8), "BININT2": _fixed(_U16), "BINFLOAT": _fixed(_DOUBLE),
    "LONG1": _long(_U8), "LONG4": _long(_U32),
    "SHORT_BINUNICODE": _text(_U8), "BINUNICODE": _text(_U32), "BINUNICODE8": _text(_U64),
    "SHORT_BINBYTES": _bytes(_U8), "BINBYTES": _bytes(_U32), "BINBYTES8": _bytes(_U64),
    "EMPTY_LIST": _new(list), "EMPTY_DICT": _new(dict), "EMPTY_TUPLE": _push(()),
    "TUPLE": lambda reader: reader.stack.append(tuple(reader.since_mark())),
    "TUPLE1": _tuple_of(1), "TUPLE2": _tuple_of(2), "TUPLE3": _tuple_of(3),
    "APPEND": _append, "APPENDS": lambda reader: _extend(reader, reader.since_mark()),
    "SETITEM": _setitem, "SETITEMS": lambda reader: _set(reader, reader.since_mark()),
    "MEMOIZE": _put(None), "BINPUT": _put(_U8), "LONG_BINPUT": _put(_U32),
    "BINGET": _get(_U8), "LONG_BINGET": _get(_U32),
}  # fmt: skip
_CODES = {each.name: ord(each.code) for each in pickletools.opcodes}
_HANDLERS = {_CODES[name]: handler for name, handler in _BY_NAME.items()}
