"""The site of docs/: index.md names each page, and what is made of the code has every command and name."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import meshwright as mw
from tests import commands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / f"site/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pages = loaded("pages")


def reachable_from(page: Path, seen: set[str]) -> set[str]:
    """The pages that can be reached by links from index pages."""
    for target in pages.links_of(page):
        if target not in seen:
            seen.add(target)
            if target.endswith("index.md"):
                reachable_from(DOCS / target, seen)
    return seen


def test_the_index_leads_to_every_page():
    every = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert every - reachable_from(DOCS / "index.md", {"index.md"}) == set()


def test_every_page_is_in_the_menu_once():
    def leaves(menu: object) -> list[str]:
        if isinstance(menu, str):
            return [menu]
        inside = menu.values() if isinstance(menu, dict) else menu
        return [leaf for each in inside for leaf in leaves(each)]

    found = leaves(pages.navigation())
    every = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(found) == sorted(every | set(pages.FROM_ROOT.values()))
    assert all((ROOT / home).is_file() for home in pages.FROM_ROOT)


def test_llms_txt_is_made_of_the_index_and_names_pages_that_exist():
    text = pages.llms_text()
    if os.environ.get("UPDATE_GOLDEN"):
        (ROOT / "llms.txt").write_text(text)
    assert (ROOT / "llms.txt").read_text() == text, "UPDATE_GOLDEN=1 writes it again"
    names = re.findall(r"\]\((docs/[^)]+)\)", text)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_the_page_of_commands_has_every_command_and_option_of_its_help():
    text = pages.commands()
    verbs = re.findall(r"^### meshwright (.+)$", text, re.M)
    assert {"weigh", "plan", "train", "data tokenize"} <= set(verbs)
    for verb in ("weigh", "train", "data tokenize"):
        section = text.partition(f"### meshwright {verb}\n")[2].partition("\n### ")[0]
        shown = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", commands.run(*verb.split(), "--help").output))
        options = shown - {"--help"}
        assert options
        assert {option for option in options if option not in section} == set()


def test_the_page_of_python_has_every_public_name():
    sections = pages.public_names()
    names = {name for section in sections.values() for name in section}
    assert {f"meshwright.{name}" for name in mw.__all__} == names
    assert all(sections.values())
    assert all(f"::: {name}\n" in pages.python() for name in names)


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](../reference/json.md#x)", "[a](../reference/json.md#x)"),
        ("[a](../../CONTRIBUTING.md)", "[a](../dev/contributing.md)"),
        ("[a](../../benchmarks/size.py)", "a"),
        ("![a](../../benchmarks/records/x.svg)", "![a](../pictures/x.svg)"),
        ("![a](../results/accuracy.svg)", "![a](../results/accuracy.svg)"),
        ("[a](https://docs.jax.dev)", "[a](https://docs.jax.dev)"),
        ("[a](#here)", "[a](#here)"),
        ("```python\nx = [f](y)\n```\n", "```python\nx = [f](y)\n```\n"),
    ],
)
def test_a_link_that_leaves_the_folder_keeps_its_words(link: str, on_the_site: str, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert pages.relinked(link, "docs/how-to/data.md", "how-to/data.md") == on_the_site


def test_a_link_out_of_the_folder_leads_into_the_repository_where_that_is_known(monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/meshwright")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    made = pages.relinked("[a](../../benchmarks/size.py)", "docs/how-to/data.md", "how-to/data.md")
    assert made == "[a](https://example.org/someone/meshwright/blob/HEAD/benchmarks/size.py)"


def test_a_root_file_is_linked_as_a_page_of_its_new_place():
    made = pages.relinked(
        "[a](docs/how-to/data.md) [b](CHANGELOG.md)", "CONTRIBUTING.md", "dev/contributing.md"
    )
    assert made == "[a](../how-to/data.md) [b](changelog.md)"
