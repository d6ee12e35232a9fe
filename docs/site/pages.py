"""Make the site of docs/: its order, the pages that are made of the code, and links that leave the folder.

MkDocs calls the functions `on_...` (mkdocs.yml names this file under `hooks`); `make docs` calls MkDocs. The
pages `reference/commands.md` and `reference/python.md` hold a mark, and what stands there on the site is made
of the command line and of the package's public names whenever the site is built.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHELVES = {
    "tutorials": "Tutorials",
    "how-to": "How-to",
    "reference": "Reference",
    "explanation": "Explanation",
    "results": "Results",
    "dev": "Work on it",
}
"""The folders of docs/ in the order of the site, with their titles."""
FROM_ROOT = {
    "CONTRIBUTING.md": "dev/contributing.md",
    "SECURITY.md": "dev/security.md",
    "CHANGELOG.md": "dev/changelog.md",
}
"""Files of the repository's root that are pages of the site too."""
MARKS = ("<!-- every command -->", "<!-- every public name -->")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)$", re.M | re.S)


def links_of(page: Path) -> list[str]:
    """Return the pages of docs/ that a page links to, in its order and once each."""
    found = (target for _, target in LINK.findall(page.read_text()) if "://" not in target)
    paths = (posixpath.normpath(page.parent.relative_to(DOCS) / target.partition("#")[0]) for target in found)
    return list(dict.fromkeys(path for path in paths if path.endswith(".md") and (DOCS / path).is_file()))


def title_of(page: str) -> str:
    """Return a page's heading."""
    return (DOCS / page).read_text().partition("\n")[0].removeprefix("# ")


def navigation() -> list[dict[str, Any]]:
    """Return the site's menu: each shelf's pages in the order of index.md, then what it does not name."""
    menu: list[dict[str, Any]] = [{"Home": "index.md"}]
    order = links_of(DOCS / "index.md")
    for shelf, title in SHELVES.items():
        pages = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / shelf).rglob("*.md"))
        named = [page for page in order if page in pages]
        folders: dict[str, list[str]] = {}
        for page in [*named, *(page for page in pages if page not in named)]:
            folders.setdefault(posixpath.dirname(page), []).append(page)
        own: list[Any] = folders.pop(shelf, [])
        own += [{title_of(f"{folder}/index.md"): inside} for folder, inside in folders.items()]
        menu.append({title: own + (list(FROM_ROOT.values()) if shelf == "dev" else [])})
    return menu


LLMS = """# Meshwright

> Know what a training run costs before the machines are rented, then run it.

Meshwright compiles the training step of a neural network for accelerators that are not there. It accounts for
the bytes, FLOPs and messages of the compiled program, predicts its time, plans layouts, trains, and compares
what happened with what was predicted. It is written in Python on JAX: `import meshwright as mw`,
`meshwright weigh llama3-8b --on 8xH100`. It is on no package index: `pip install '.[nvidia,train]'` in a
clone of the repository installs it.
"""


def llms_text() -> str:
    """Return llms.txt, the contents for language models: the questions of index.md with their pages."""
    lines: list[str] = []
    for line in (DOCS / "index.md").read_text().splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        elif row := re.match(r"\| (.+) \| \[(.+)\]\((.+)\)(.*) \|$", line):
            lines.append(f"- [{row[2]}](docs/{row[3]}): {row[1]}")
    return LLMS + "\n".join(lines) + "\n"


def pictures_elsewhere() -> dict[str, str]:
    """Return pictures outside docs/ that pages show: their path in the repository, by that on the site."""
    found: dict[str, str] = {}
    for page in DOCS.rglob("*.md"):
        for _, target in IMAGE.findall(page.read_text()):
            path = posixpath.normpath(
                posixpath.join("docs", page.parent.relative_to(DOCS).as_posix(), target)
            )
            if not path.startswith("docs/"):
                found[_on_the_site(path)] = path
    return found


def _on_the_site(picture: str) -> str:
    return f"pictures/{posixpath.basename(picture)}"


def relinked(text: str, home: str, place: str) -> str:
    """Return Markdown of the repository's file `home` with its links as the site's page `place` needs them.

    A link to a file that is no page of the site leads into the repository if the variables of a GitHub
    workflow say where that is; otherwise its words stay, without the link.
    """

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        path, mark, heading = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), path))
        page = FROM_ROOT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is not None:
            return f"[{words}]({posixpath.relpath(page, posixpath.dirname(place) or '.')}{mark}{heading})"
        repository = os.environ.get("GITHUB_REPOSITORY")
        if repository is None:
            return words
        return f"[{words}]({os.environ['GITHUB_SERVER_URL']}/{repository}/blob/HEAD/{path}{mark}{heading})"

    def picture(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), match[2]))
        if path.startswith("docs/"):
            return match[0]
        return f"![{match[1]}]({posixpath.relpath(f'docs/{_on_the_site(path)}', posixpath.dirname(home))})"

    text = IMAGE.sub(picture, text)
    parts = FENCE.split(text)  # what stands in a block of code is no link
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def commands() -> str:
    """Return the reference of the command line: every command with its arguments and options."""
    from typer.main import get_command

    from meshwright.cli import app_for

    panels: dict[str, list[str]] = {}
    for name, command in _verbs("meshwright", get_command(app_for(()))):
        panels.setdefault(getattr(command, "rich_help_panel", None) or "Data", []).extend(
            _section(name, command)
        )
    return "\n".join(line for title, lines in panels.items() for line in [f"## {title}", "", *lines])


def _verbs(name: str, command: Any) -> list[tuple[str, Any]]:
    """Return the commands below a command, with the words that call them."""
    found: list[tuple[str, Any]] = []
    for word, below in command.commands.items():
        words = f"{name} {word}"
        found += _verbs(words, below) if hasattr(below, "commands") else [(words, below)]
    return found


def _section(name: str, command: Any) -> list[str]:
    lines = [f"### {name}", "", command.help or "", ""]
    if command.epilog:
        lines += [re.sub(r"^Example: (.*)$", r"Example: `\1`", command.epilog), ""]
    context = command.make_context(name, [], resilient_parsing=True)
    parameters = [
        each for each in command.get_params(context) if not each.hidden and "--help" not in each.opts
    ]
    rows = [_row(each) for each in parameters]
    if rows:
        lines += ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""]
    return lines


def _row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    flag = getattr(parameter, "is_flag", False)
    if not names[0].startswith("-"):
        shown = f"`{parameter.metavar or names[0].upper()}`"
    else:
        value = f" {parameter.metavar}" if parameter.metavar and not flag else ""
        shown = ", ".join(f"`{name}{value}`" for name in names)
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if parameter.required:
        default = "required"
    elif flag or default is None or default in ([], ()) or parameter.show_default is False:
        default = ""
    else:
        default = f"{getattr(default, 'value', default)}"
    return f"| {shown} | {_cell(parameter.help or '')} | {_cell(default)} |"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


KINDS = {
    "api": "Verbs",
    "contrib": "Verbs",
    "programs": "What is weighed",
    "contrib.scripts": "What is weighed",
    "contrib.torch": "What is weighed",
    "contrib.torch_as_jax": "What is weighed",
    "contrib.instruments": "Measure arrays, memory and speed",
    "measure": "Measure arrays, memory and speed",
    "errors": "Errors",
}
"""Sections of the reference, by the package that a function comes from, or the room of `contrib`."""
OTHERS, RECORDS = "Describe arguments and kernels", "Records"


def public_names() -> dict[str, list[str]]:
    """Return every public name by its section, as paths from the package."""
    sections: dict[str, list[str]] = {title: [] for title in (*KINDS.values(), OTHERS, RECORDS)}
    for name, home in _imported(ROOT / "src/meshwright/__init__.py").items():
        package, _, room = home.partition(".")
        title = KINDS.get(f"{package}.{room.partition('.')[0]}", KINDS.get(package, OTHERS))
        title = RECORDS if name[0].isupper() and home != "errors" else title
        sections[title].append(f"meshwright.{name}")
    return sections


def _imported(package: Path) -> dict[str, str]:
    """Return the names that a package imports for type checkers, each with the module it is from."""
    blocks = (node for node in ast.parse(package.read_text()).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def python() -> str:
    """Return the reference of the Python interface, in which mkdocstrings writes each name's section."""
    lines: list[str] = []
    for kind, names in public_names().items():
        lines += [f"## {kind}", ""]
        for name in sorted(names):
            lines += [f"::: {name}", ""]
    return "\n".join(lines)


def on_config(config: Any) -> Any:
    """Give the site its menu."""
    config.nav = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand in the repository's root, and pictures from elsewhere in it."""
    from mkdocs.structure.files import File

    for home, place in FROM_ROOT.items():
        files.append(File.generated(config, place, content=relinked((ROOT / home).read_text(), home, place)))
    for place, path in pictures_elsewhere().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write what is made of the code, and mend links that leave docs/."""
    place = page.file.src_uri
    if place not in FROM_ROOT.values():
        markdown = relinked(markdown, f"docs/{place}", place)
    for mark, made in zip(MARKS, (commands, python), strict=True):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def on_post_build(config: Any) -> None:
    """Put llms.txt and the sources of the pages, which it names, beside the pages."""
    (Path(config.site_dir) / "llms.txt").write_text(llms_text().replace("](docs/", "]("))
    for path in DOCS.rglob("*.md"):
        target = Path(config.site_dir) / path.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
