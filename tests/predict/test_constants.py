import re
from pathlib import Path

import pytest

from meshwright.predict import _rates as _constants

FOLDER = Path(_constants.__file__).parent
# Numbers that are no property of a machine: counts, halves, the identity, percents, microseconds, the size of
# a memo, the least shares that are printed and proposed, the orders of four axes, XLA's number for host
# memory, a head size that stands for any, the seconds of an hour, the bounds of a run's steps and price.
ALLOWED = {"0", "1", "2", "0.0", "1.0", "100", "1e6", "10_000", "0.002", "0.01", "24", "5", "128"}
ALLOWED |= {"3600", "10", "18", "1e9"}


def test_the_files_hold_their_source():
    assert "aiconfigurator" in _constants.fitted()["source"]
    assert {"sustained", "shared", "products", "attention", "interval"} == set(_constants.runs())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_no_constant_of_a_machine_stands_in_code(path):
    text = re.sub(r'"""[\s\S]*?"""|#.*|"[^"\n]*"', "", path.read_text())
    numbers = set(re.findall(r"(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e-?\d+)?(?![\w.])", text))
    assert numbers <= ALLOWED


@pytest.mark.parametrize("table", ["shared", "sustained", "products", "attention", "interval"])
def test_every_table_of_constants_is_explained_beside_it(table):
    text = (FOLDER / "runs.toml").read_text()
    place = re.search(rf"^\[{table}[\].]", text, re.M).start()
    assert text[:place].rstrip().splitlines()[-1].startswith("#") or "#" in text[place : place + 200]
