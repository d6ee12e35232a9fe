"""Read the commands of a shell script without running anything.

Variables that the script itself sets to plain text are put in, and so are defaults (`${TP:-1}`). Branches
whose condition compares known texts or numbers are decided. What only a run would know stays unknown:
`$(...)`, and what is set in a loop or an undecided branch. An unknown part of a word is its text between two
zero bytes; readers refuse words with one where they matter. What an undecided branch adds to an array is the
array's name with what is added, so.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.errors import InputError

MOST_WORDS = 20_000  # of one script, after variables are put in
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.ASCII | re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BRACED = re.compile(r"([A-Za-z_]\w*|\d)(\[[@*]\])?(?:(:?[-=])(.*))?", re.ASCII | re.DOTALL)
_OPENS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_KEYWORDS = frozenset({"then", "do", "else", "elif"})
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_PREFIXES = _KEYWORDS | _DECLARES | {"!"}
_NUMBERS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge,
             "-lt": operator.lt, "-le": operator.le}  # fmt: skip
_WORDS = re.compile(r"(?:\0[^\0]*\0|[^\s\0])+")  # an unknown part is never divided
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)
_ENDS = "\n;&|"
_LINKS = ("&&", "||")
_TESTS = frozenset({"[", "[[", "test", "!", "command", "grep", "which"})


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command, with the variables that are set for it alone, and those set before it.

    `inherited` is empty where no word is a shell or its script, which alone read them.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    inherited: Mapping[str, str] = field(default_factory=dict[str, str])


def is_known(word: str) -> bool:
    """Return whether all of a word is known without a run."""
    return "\0" not in word


def shown(word: str) -> str:
    """Return a word with its unknown parts as the script writes them."""
    return word.replace("\0", "")


@dataclass(slots=True)
class _Branch:
    """A block that is open: whether its part is run, and whether an earlier part was; None if undecided.

    `link`: `&&` or `||` where its condition goes on.
    """

    is_run: bool | None = None
    was_run: bool | None = False
    link: str = ""


class _Script:
    """A walk over a text: its variables so far, and the commands that it has passed."""

    def __init__(
        self, file: str, text: str, given: Mapping[str, str], inherited: Mapping[str, str] | None = None
    ) -> None:
        self.file, self.text, self.place = file, text.replace("\\\n", " "), 0
        self.scalars: dict[str, str] = {**(inherited or {}), **given}
        self.arrays: dict[str, list[str]] = {}
        self.given = frozenset(given)
        self.branches: list[_Branch] = []
        self.ended_by = ""
        self.chain: bool | None = True  # whether what comes after && or || is run
        self.waiting: list[str] = []  # ends of here-documents that begin after this line
        self.num_words = 0

    def commands(self) -> Iterator[Command]:
        """Yield the commands in order."""
        while self.place < len(self.text):
            words = self._line()
            if words and self._goes_on(words):
                continue
            while words and (
                words[0] in _PREFIXES or words[0] in _OPENS | _CLOSES or words[0].endswith("()")
            ):
                self._branch(words[0], words[1:])
                words = words[1:]
            own: dict[str, str] = {}
            while words and (found := _ASSIGNMENT.fullmatch(words[0])):
                own[found[1]] = found[3]
                words = words[1:]
            if words and self._is_run() is not False:
                has_shell = any(word.endswith("sh") or word == "eval" for word in words)
                yield Command(tuple(words), own, {**self.scalars, **own} if has_shell else {})
            self._link(words)

    def _link(self, words: Sequence[str]) -> None:
        """Note whether what follows a command is run; one that is no test is taken to succeed."""
        if self.ended_by not in _LINKS:
            self.chain = True
            return
        holds = _decided(words)
        if holds is None and words[:1] and words[0] not in _TESTS and self.ended_by == "&&":
            holds = True
        follows = None if holds is None else holds == (self.ended_by == "&&")
        self.chain = follows if self.chain else self.chain

    def _is_run(self) -> bool | None:
        """Return whether what stands here is run: None if only a run would know."""
        states = [self.chain, *(each.is_run for each in self.branches)]
        return functools.reduce(_both, states)

    def _branch(self, word: str, condition: Sequence[str]) -> None:
        """Open, close or switch a block by the word that does."""
        if word in _OPENS:
            self.branches.append(_Branch())
        elif word in _CLOSES and self.branches:
            self.branches.pop()
        elif word in ("elif", "else") and self.branches:
            branch = self.branches[-1]
            branch.was_run = _either(branch.was_run, branch.is_run)
        if word in ("if", "elif", "else") and self.branches:
            branch = self.branches[-1]
            holds = True if word == "else" else _decided(condition) if self.ended_by != "|" else None
            branch.is_run = _both(_not(branch.was_run), holds)
            branch.link = self.ended_by if word != "else" and self.ended_by in _LINKS else ""

    def _goes_on(self, words: Sequence[str]) -> bool:
        """Return whether words are a further part of a condition, and take them into it."""
        if not (self.branches and (branch := self.branches[-1]).link):
            return False
        holds = _decided(words) if self.ended_by != "|" else None
        if branch.link == "&&":
            branch.is_run = _both(branch.is_run, holds)
        else:
            branch.is_run = _both(_not(branch.was_run), _either(branch.is_run, holds))
        branch.link = self.ended_by if self.ended_by in _LINKS else ""
        return True

    def _line(self) -> list[str]:
        """Return the words up to the next end of a command; assignments of a line of its own are made."""
        words: list[str] = []
        only_sets = True
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter in _ENDS:
                self._end()
                if words:
                    break
                self._link(())
                continue
            if letter in " \t()":
                self.place += 1
                continue
            if letter == "#":
                self._skip_comment()
                continue
            if letter in "<>":
                self._redirection()
                continue
            found = self._set() if only_sets else None
            if found is not None:
                if not self._ends_here() and found:
                    words += [f"{name}={value}" for name, value in found.items()]
                continue
            words += self._words()
            if len(words) == 1 and words[0] in _KEYWORDS - {"elif"}:
                break  # so that it switches its block before what follows is read
            only_sets = all(
                word in _PREFIXES or (word[:1] == "-" and words[0] in _DECLARES) for word in words
            )
        self._keep(words)
        return words

    def _end(self) -> None:
        """Pass the end of a command; what follows anything but `&&` and `||` is run."""
        two = self.text[self.place : self.place + 2]
        self.ended_by = two if two in _LINKS else two[0]
        self.place += len(self.ended_by)
        if self.ended_by == "\n":
            self._skip_documents()

    def _keep(self, words: list[str]) -> None:
        """Make the assignments of a line that has nothing else, or that exports them."""
        self.num_words += len(words)
        if self.num_words > MOST_WORDS:
            hint = "name the file that it launches, with --on"
            raise InputError(f"{self.file} has more than {MOST_WORDS:,} words", hint=hint)
        rest = words[1:] if words and words[0] in _PREFIXES else words
        if rest and all(_ASSIGNMENT.fullmatch(word) for word in rest):
            for word in rest:
                if found := _ASSIGNMENT.fullmatch(word):
                    self._assign(found[1], found[3], found[2] == "+")
            words.clear()

    def _assign(self, name: str, value: str, appends: bool = False) -> None:
        if name in self.given:
            return  # the scheduler's own
        if (run := self._is_run()) is False:
            return
        if run is None:
            value = f"\0${name}\0"
        self.scalars[name] = self.scalars.get(name, "") + value if appends else value

    def _set(self) -> dict[str, str] | None:
        """Read an assignment at this place; None if there is none. An array is kept at once."""
        found = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII).match(self.text, self.place)
        if found is None:
            return None
        self.place = found.end()
        name, appends = found[1], bool(found[2])
        if self.text[self.place : self.place + 1] == "(":
            self.place += 1
            items = self._array()
            if (run := self._is_run()) is None:
                inside = " ".join(items).replace("\0", "") if appends else ""
                items = [f"\0${{{name}[@]}} {inside}".rstrip() + "\0"]
            if run is not False:
                self.arrays[name] = [*self.arrays.get(name, []), *items] if appends else items
            return {}
        value = (
            " ".join(self._words())
            if self.place < len(self.text) and self.text[self.place] not in " \t\n;&|"
            else ""
        )
        if self._ends_here():
            self._assign(name, value, appends)
        return {name: value}

    def _ends_here(self) -> bool:
        place = self.place
        while place < len(self.text) and self.text[place] in " \t":
            place += 1
        return place >= len(self.text) or self.text[place] in "\n;&|#)"

    def _array(self) -> list[str]:
        items: list[str] = []
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter == ")":
                self.place += 1
                return items
            if letter in " \t\n":
                self.place += 1
            elif letter == "#":
                self._skip_comment()
            elif letter in ";&|<>(":
                self.place += 1
            else:
                items += self._words()
        return items

    def _words(self) -> list[str]:
        """Read one word, which a variable without quotes may make several."""
        made: list[str] = [""]
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter in " \t\n;&|()<>":
                break
            self.place += 1
            if letter == "\\":
                made[-1] += self.text[self.place : self.place + 1]
                self.place += 1
            elif letter == "'":
                end = self._find("'")
                made[-1] += self.text[self.place : end]
                self.place = end + 1
            elif letter == '"':
                pieces = self._quoted()
                made[-1] += pieces[0]
                made += pieces[1:]
            elif letter in "$`":
                for number, piece in enumerate(self._expansion(letter, quoted=False)):
                    if number:
                        made.append("")
                    made[-1] += piece
            else:
                made[-1] += letter
        return [word for word in made if word] or ([""] if made == [""] else [])

    def _quoted(self) -> list[str]:
        made = [""]
        while self.place < len(self.text):
            letter = self.text[self.place]
            self.place += 1
            if letter == '"':
                return made
            if letter == "\\" and self.text[self.place : self.place + 1] in tuple('"\\$`'):
                made[-1] += self.text[self.place]
                self.place += 1
            elif letter in "$`":
                pieces = self._expansion(letter, quoted=True)
                made[-1] += pieces[0]
                made += pieces[1:]
            else:
                made[-1] += letter
        raise self._open('"')

    def _expansion(self, letter: str, *, quoted: bool) -> list[str]:
        """Return what a variable stands for, as one text or, without quotes, as its words."""
        begin = self.place - 1
        if letter == "`":
            self.place = self._find("`") + 1
            return [f"\0{self.text[begin : self.place]}\0"]
        after = self.text[self.place : self.place + 1]
        if after == "(":
            self._skip_nested("(", ")")
            return [self._number(self.text[begin : self.place])]
        if after == "{":
            self._skip_nested("{", "}")
            return self._braced(self.text[begin + 2 : self.place - 1], self.text[begin : self.place], quoted)
        if (found := _NAME.match(self.text, self.place)) is not None:
            self.place = found.end()
            return self._value(found[0], f"${found[0]}", quoted)
        if after and after in "@*#?$!-0123456789":
            self.place += 1
            return self._value(after, f"${after}", quoted)
        return ["$"]

    def _number(self, whole: str) -> str:
        """Return the value of `$((A * B / 2))` if all of it is known; else that it is not known."""
        if not (whole.startswith("$((") and whole.endswith("))") and len(whole) < 200):
            return f"\0{whole}\0"
        inside = whole[3:-2]
        for name in sorted(set(_NAME.findall(inside)), key=len, reverse=True):
            value = self.scalars.get(name, "")
            inside = re.sub(rf"\$?\{{?\b{name}\b\}}?", value if value.isdecimal() else "x", inside)
        try:
            return str(_value_of(ast.parse(inside.replace("/", "//").strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return f"\0{whole}\0"

    def _braced(self, inside: str, whole: str, quoted: bool) -> list[str]:
        found = _BRACED.fullmatch(inside)
        if found is None:
            return [f"\0{whole}\0"]
        name, is_array, sign, default = found.groups()
        if is_array:
            return self._array_of(name, whole, quoted)
        if sign and name not in self.scalars and name not in self.arrays:
            inner = _Script(self.file, default.strip("\"'"), {})
            inner.scalars, inner.arrays, inner.given = self.scalars, self.arrays, self.given
            value = " ".join(word for command in inner.commands() for word in command.words)
            if sign.endswith("="):
                self._assign(name, value)
            return self._split(value, quoted)
        return self._value(name, whole, quoted)

    def _array_of(self, name: str, whole: str, quoted: bool) -> list[str]:
        if name not in self.arrays:
            return self._value(name, whole, quoted)
        items = self.arrays[name]
        return (
            list(items) or [""]
            if quoted
            else [word for item in items for word in self._split(item, False)] or [""]
        )

    def _value(self, name: str, whole: str, quoted: bool) -> list[str]:
        if name in self.arrays and name not in self.scalars:
            return self.arrays[name][:1] or [""]
        if name not in self.scalars:
            return [f"\0{whole}\0"]
        return self._split(self.scalars[name], quoted)

    def _split(self, value: str, quoted: bool) -> list[str]:
        if len(value) > 2**18:
            raise InputError(
                f"{self.file}: a variable grows beyond 256 KiB", hint="name the file that it launches"
            )
        return [value] if quoted else _WORDS.findall(value) or [""]

    def _find(self, letter: str) -> int:
        end = self.text.find(letter, self.place)
        if end < 0:
            raise self._open(letter)
        return end

    def _skip_nested(self, opens: str, closes: str) -> None:
        depth = 0
        while self.place < len(self.text):
            letter = self.text[self.place]
            self.place += 1
            depth += (letter == opens) - (letter == closes)
            if not depth:
                return
        raise self._open(opens)

    def _open(self, letter: str) -> InputError:
        return InputError(f"{self.file}: {letter} is not closed", hint="correct the script")

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.place)
        self.place = len(self.text) if end < 0 else end

    def _redirection(self) -> None:
        """Pass a redirection; note the end of a here-document."""
        found = re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(self.text, self.place)
        if found is not None:
            self.waiting.append(found[2])
            self.place = found.end()
            return
        while self.place < len(self.text) and self.text[self.place] in "<>&-0123456789 \t":
            self.place += 1
        if self.place < len(self.text) and self.text[self.place] not in _ENDS:
            self._words()

    def _skip_documents(self) -> None:
        for end in self.waiting:
            found = re.compile(rf"^\s*{re.escape(end)}\s*$", re.MULTILINE).search(self.text, self.place)
            self.place = len(self.text) if found is None else found.end()
        self.waiting = []


def _value_of(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers.

    Raises:
        ValueError: it has something else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**18:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _NUMBERS:
        return _NUMBERS[type(node.op)](_value_of(node.left), _value_of(node.right))
    raise ValueError("it is not of whole numbers")


def _not(one: bool | None) -> bool | None:
    return None if one is None else not one


def _both(one: bool | None, other: bool | None) -> bool | None:
    return False if False in (one, other) else None if None in (one, other) else True


def _either(one: bool | None, other: bool | None) -> bool | None:
    return _not(_both(_not(one), _not(other)))


def _decided(condition: Sequence[str]) -> bool | None:
    """Return whether a condition holds, if it is a comparison of what is known; else None.

    >>> _decided(["[[", "fp8", "==", "fp8", "]]"]), _decided(["[", "8", "-gt", "9", "]"]), _decided(["ls"])
    (True, False, None)
    """
    words = list(condition)
    if words and words[0] == "!":
        return _not(_decided(words[1:]))
    if words[:1] not in (["["], ["[["], ["test"]) or not all(map(is_known, words)):
        return None
    inner = words[1:] if words[0] == "test" else words[1:-1]
    match inner:
        case ["!", *rest]:
            return _not(_decided(["test", *rest]))
        case ["-n" | "-z" as sign, value]:
            return bool(value) == (sign == "-n")
        case [left, "=" | "==" | "!=" as sign, right] if not set(right) & set("*?["):
            return (left == right) == (sign != "!=")
        case [left, sign, right] if sign in _COMPARED and _WHOLE.fullmatch(left) and _WHOLE.fullmatch(right):
            return _COMPARED[sign](int(left), int(right))
        case _:
            return None


def commands_of(
    file: str, text: str, given: Mapping[str, str] | None = None, inherited: Mapping[str, str] | None = None
) -> list[Command]:
    """Return the commands of a script, in order, with its own variables put in.

    Args:
        given: variables of the scheduler, such as SLURM_NNODES, and the script's arguments as "1", "2".
        inherited: variables that were set before, and that the script may set again.

    Raises:
        InputError: a quote or a bracket is not closed, or it is far too long or too deep.

    >>> [command.words for command in commands_of("x", 'N=2; ARGS=(--a "b c")\\nrun $N ${ARGS[@]} $1 # no')]
    [('run', '2', '--a', 'b', 'c', '\\x00$1\\x00')]
    """
    try:
        return list(_Script(file, text, given or {}, inherited).commands())
    except RecursionError:
        what = f"{file}: defaults of variables stand too deep in each other"
        raise InputError(what, hint="name the file that it launches, with --on") from None
