"""The pages for people who change the code name what exists, and their picture is the contract's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.test_site import DOCS, ROOT, loaded

rooms = loaded("rooms")
PAGE = DOCS / "dev/where-to-change.md"
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|toml|md)|(?:[\w.-]+/)+)(?::(\w+))?`")


def found(path: str) -> Path:
    own = ROOT / path
    is_own = path.startswith(("tests/", "docs/", "benchmarks/")) or path == "pyproject.toml"
    return own if is_own else ROOT / "src/meshwright" / path


ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]


def test_the_page_has_the_everyday_changes():
    assert len(ROWS) > 40
    assert all(len(row.split(" | ")) == 3 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_every_file_and_name_of_a_row_exists(row: str):
    named = NAMED.findall(row)
    assert any(path.startswith("tests/") for path, _ in named)
    for path, name in named:
        assert found(path).exists(), path
        if name:
            text = found(path).read_text()
            assert re.search(rf"^(?:(?:async )?def|class) {name}\b|^{name}\b.* = ", text, re.M), (path, name)


def test_the_picture_of_the_rooms_is_that_of_the_contract():
    drawn = rooms.picture(rooms.house())
    if os.environ.get("UPDATE_GOLDEN"):
        rooms.PICTURE.write_text(drawn)
    assert rooms.PICTURE.read_text() == drawn, "python docs/site/rooms.py draws it again"


def test_every_package_is_a_room():
    names = {room.name for floor in rooms.house()["meshwright"] for room in floor}
    source = ROOT / "src/meshwright"
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    modules = {path.stem for path in source.glob("*.py") if not path.name.startswith("__")}
    assert packages | modules == names


def test_a_room_that_others_may_not_import_stands_outside(tmp_path):
    package = tmp_path / "src/house"
    for name in ("core", "contrib"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text(f'"""Hold {name}: what it is."""\n')
    (tmp_path / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_package = "house"\n'
        '[[tool.importlinter.contracts]]\nname = "down"\ntype = "layers"\n'
        'containers = ["house"]\nlayers = ["core"]\n'
        '[[tool.importlinter.contracts]]\nname = "door"\ntype = "forbidden"\n'
        'source_modules = ["house.core"]\nforbidden_modules = ["house.contrib"]\n'
        '[[tool.importlinter.contracts]]\nname = "no jax"\ntype = "forbidden"\n'
        'source_modules = ["house.core"]\nforbidden_modules = ["jax"]\n'
    )
    (outside,), (core,) = rooms.house(tmp_path)["house"]
    assert (outside.name, outside.outside, outside.words) == ("contrib", True, "Hold contrib")
    assert (core.name, core.outside, core.imports_no_jax) == ("core", False, True)
    assert "stroke-dasharray" in rooms.picture({"house": [[outside], [core]]})
