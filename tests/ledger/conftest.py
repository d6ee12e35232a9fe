"""Programs that real compilers left behind, and small ones written by hand."""

import functools
from pathlib import Path

import pytest

from meshwright.compiler import Compiled, read_text
from meshwright.hardware import Fleet
from meshwright.hlo import Program, parse_program
from meshwright.ledger import Ledger, ledger_of

FIXTURES = Path(__file__).parent / "fixtures"


class Samples:
    """The compiled programs in `fixtures/`, made by `fixtures/make.py`."""

    names = sorted(p.parent.name for p in FIXTURES.glob("*/compiled.json"))

    def folder(self, name: str) -> Path:
        return FIXTURES / name

    def compiled(self, name: str) -> Compiled:
        return Compiled.load(FIXTURES / name)

    def text(self, name: str, file: str) -> str:
        return read_text(FIXTURES / name, file)

    @functools.cache  # noqa: B019  # one object lives for the session
    def program(self, name: str) -> Program:
        return parse_program(self.text(name, "program.hlo.txt"))

    @functools.cache  # noqa: B019
    def ledger(self, name: str) -> Ledger:
        compiled = self.compiled(name)
        return ledger_of(FIXTURES / name, compiled, Fleet.parse(compiled.fleet))


@pytest.fixture(scope="session")
def samples() -> Samples:
    return Samples()


@pytest.fixture(scope="session")
def module():
    """A program whose entry computation has the given lines, after the given computations."""

    def build(*lines: str, before: str = "") -> Program:
        body = "\n".join(f"  {line}" for line in lines)
        return parse_program(
            f"HloModule m, is_scheduled=true\n\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
        )

    return build
