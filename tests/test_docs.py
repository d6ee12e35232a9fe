"""What README and docs say, done: Python blocks run, commands succeed, links lead somewhere.

A block whose first line is a comment `file: NAME` is written under that name where the page's other blocks
run. A block whose first line is the comment `needs torch` runs where PyTorch is installed. `make test` runs
the README's Python blocks, `make test-long` commands below the comment `takes minutes` and those of a large
model on other pages, `make test-wide` the others. A `text` block right below a Python block that prints is
compared with what that block prints.
"""

from __future__ import annotations

import codeop
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# file: (\S+)\n")
NEEDS_TORCH = "# needs torch\n"
HAS_TORCH = importlib.util.find_spec("torch") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; `line` is that of its first line on the page."""

    language: str
    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that the reader of a page is to type."""

    page: Path
    text: str
    takes_minutes: bool


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(language=match[1], text=match[2], line=text.count("\n", 0, match.start(2)) + 1)
        for match in BLOCK.finditer(text)
    ]


def commands_of(page: Path) -> list[Command]:
    """Of `sh` blocks each line, of `console` blocks each line after `$ `; `\\` joins lines."""
    found: list[Command] = []
    for block in blocks_of(page):
        if block.language not in ("sh", "console"):
            continue
        takes_minutes = False
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith("#"):
                takes_minutes = "takes minutes" in line
            elif block.language == "sh" and line.strip():
                found.append(Command(page=page, text=line.strip(), takes_minutes=takes_minutes))
                takes_minutes = False
            elif line.startswith("$ "):
                found.append(Command(page=page, text=line[2:].strip(), takes_minutes=takes_minutes))
                takes_minutes = False
    return found


COMMANDS = [command for page in PAGES for command in commands_of(page)]
# A command that two pages show is run once, as the first of them says.
OURS = [
    command
    for place, command in enumerate(COMMANDS)
    if command.text.startswith("meshwright ") and command.text not in {c.text for c in COMMANDS[:place]}
]
MAKE = sorted({command.text for command in COMMANDS if command.text.startswith("make ")})


def id_of(command: Command) -> str:
    return f"{name_of(command.page)}: {command.text}"


def write_files(page: Path, folder: Path) -> None:
    (folder / "README.md").write_text((ROOT / "README.md").read_text())  # a reader's text of their own
    for block in blocks_of(page):
        if named := FILE.match(block.text):
            (folder / named[1]).write_text(block.text)


def run(command: list[str], folder: Path) -> str:
    """Return what the command prints; the tools of this environment are first on its path."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_command(command: Command, folder: Path) -> None:
    write_files(command.page, folder)
    run(["bash", "-c", command.text], folder)


def test_the_pages_are_found():
    assert {"README.md", "docs/tutorials/getting-started.md", "docs/reference/glossary.md"} <= {
        name_of(page) for page in PAGES
    }
    assert OURS


def refused_at_a_prompt(text: str) -> list[str]:
    """Return the lines at which a plain prompt reports a syntax error when the text is pasted."""
    compiler, waiting, refused = codeop.CommandCompiler(), list[str](), list[str]()
    for line in [*text.splitlines(), ""]:
        waiting.append(line)
        try:
            if compiler("\n".join(waiting), "<pasted>", "single") is not None:
                waiting = []
        except SyntaxError:
            refused.append(line)
            waiting = []
    return [*refused, *waiting]


def test_a_prompt_refuses_what_lacks_a_blank_line_or_has_one_too_many():
    assert refused_at_a_prompt("for n in range(2):\n    print(n)\nprint(3)") == ["print(3)"]
    assert refused_at_a_prompt("def f():\n    a = 1\n\n    return a") == ["    return a"]
    assert refused_at_a_prompt("def f():\n    return 1\n\n\nf()") == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_blocks_of_a_page_can_be_pasted_into_a_plain_prompt(page: Path):
    refused = {block.line: lines for block in python_of(page) if (lines := refused_at_a_prompt(block.text))}
    assert not refused


def python_of(page: Path) -> list[Block]:
    return [b for b in blocks_of(page) if b.language == "python" and not FILE.match(b.text)]


def test_blocks_that_need_torch_are_run():
    pages = [name_of(p) for p in PAGES if any(b.text.startswith(NEEDS_TORCH) for b in python_of(p))]
    assert pages
    if not HAS_TORCH:
        pytest.skip(f"PyTorch is not installed, so its blocks were left out on: {', '.join(pages)}")


FIRST = ("README.md",)
LARGE = "llama3-8b"  # many commands, of many compilations; those of smaller models are in `make test-wide`


def marks_of(page: Path, command: str = "") -> list[pytest.MarkDecorator]:
    if name_of(page) in FIRST:
        return [pytest.mark.wide if command else pytest.mark.once]
    return [pytest.mark.long if LARGE in command else pytest.mark.wide]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks_of(page), id=name_of(page)) for page in PAGES]
)
def test_every_python_block_of_a_page_runs_in_one_namespace(page: Path, tmp_path: Path):
    blocks = [b for b in python_of(page) if HAS_TORCH or not b.text.startswith(NEEDS_TORCH)]
    if not blocks:
        return  # nothing is claimed on this page
    write_files(page, tmp_path)
    lines = page.read_text().splitlines()
    kept = {number for b in blocks for number in range(b.line, b.line + b.text.count("\n"))}
    results = results_of(page)
    code = []
    for number, line in enumerate(lines, start=1):
        # All other lines are emptied, so that a traceback gives the page's own line numbers. The fence that
        # ends a block prints a mark, which tells the results of one block from those of the next.
        ends = number - 1 in kept and number not in kept
        code.append(line if number in kept else f'print("{MARK}{number}", flush=True)' if ends else "")
    script = tmp_path / f"{page.stem}.page.py"
    script.write_text("\n".join(code))
    printed = run([sys.executable, str(script)], tmp_path)
    pieces = re.split(rf"{MARK}(\d+)\n", printed)
    found = {int(line): text for text, line in zip(pieces[::2], pieces[1::2], strict=False)}
    expected = {line: text for line, text in results.items() if line in found}
    assert {line: found[line] for line in expected} == expected


MARK = "--- end of the block at line "
RESULT = re.compile(r"^```python\n((?:(?!^```).*\n)*)^```\n\n```text\n((?:(?!^```).*\n)*)^```$", re.M)


def results_of(page: Path) -> dict[int, str]:
    """Return the printed result of each Python block that has one, by the line of the block's last fence."""
    text = page.read_text()
    return {
        text.count("\n", 0, match.end(1)) + 1: match[2]
        for match in RESULT.finditer(text)
        if re.search(r"\bprint\(", match[1]) and not FILE.match(match[1])
    }


def test_pages_show_printed_results():
    assert sum(len(results_of(page)) for page in PAGES) >= 6


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=marks_of(c.page, c.text), id=id_of(c)) for c in OURS if not c.takes_minutes],
)
def test_every_command_of_the_docs_succeeds(command: Command, tmp_path: Path):
    run_command(command, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("command", [c for c in OURS if c.takes_minutes], ids=id_of)
def test_every_command_of_the_docs_that_takes_minutes_succeeds(command: Command, tmp_path: Path):
    run_command(command, tmp_path)


@pytest.mark.parametrize("command", MAKE)
def test_every_make_command_of_the_docs_names_a_target(command: str):
    # A dry run: `make test` run here would not end.
    run(["bash", "-c", f"{command} --dry-run"], ROOT)


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_link_to_a_page_or_heading_leads_there(page: Path):
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if "://" in link:
            continue
        place, _, heading = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (heading and heading not in headings_of(target)):
            broken.append(link)
    assert not broken


def headings_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as a web viewer makes them: lower case, spaces to hyphens."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
