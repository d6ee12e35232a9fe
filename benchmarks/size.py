"""Print how large the code is: lines, modules, imports, parameters and circles, each with its limit.

Run: python benchmarks/size.py [--check]. Lines are all lines, blank ones and docstrings too. The modules that
`weigh PRESET` loads are counted by weighing one twice in an empty cache, and by running its worker once more.
The exit status is 1 if a figure is above its limit. --check (as `make lint`) needs nothing but Python: it
weighs nothing, and prints only what is too large: modules, functions, and verbs with too many parameters.
"""

from __future__ import annotations

import ast
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "meshwright"
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 700, 60
MOST_LINES_OF_ALL, MOST_LINES_OF_THE_CORE = 54_000, 44_000
MOST_LOADED = 60  # modules that `weigh PRESET` loads once its program is in the cache, and its worker's
MOST_LOADED_COLD = 81  # modules that it loads where it reckons too
MOST_PARAMETERS = 8  # of a verb
MOST_PRIVATE = 57  # test files that import private modules
MOST_ROWS = 12  # of the table of commands in the README

OURS = "sorted(name for name in sys.modules if name.partition('.')[0] == 'meshwright')"
COMMAND = f"""
import contextlib, io, sys
from meshwright.cli import main
sys.argv = ["meshwright", "weigh", sys.argv[1], "--on", sys.argv[2]]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(*{OURS})
"""
REQUEST = """
import sys
from pathlib import Path
from meshwright.hardware import Fleet
from meshwright.programs import load, request_of, resolved
fleet = Fleet.parse(sys.argv[2])
run, layout = resolved(load(sys.argv[1]), fleet)
Path(sys.argv[3], "request.json").write_text(request_of(run, fleet, layout).to_json())
"""
WORKER = f"""
import os, sys
from pathlib import Path
sys.argv[0] = "-m"  # as the worker is started
from meshwright.worker._main import main
made = Path(sys.argv[1], "made")
made.mkdir()
main(Path(sys.argv[1]), made, os.getppid())
print(*set({OURS}) - {{"meshwright.worker._main"}})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the code, and the most that it may be; None if it is only shown."""

    what: str
    number: int
    limit: int | None = None

    @property
    def line(self) -> str:
        """The figure with its limit."""
        most = "" if self.limit is None else f" (at most {self.limit:,})"
        over = "  ABOVE ITS LIMIT" if self.is_above else ""
        return f"{self.number:8,}  {self.what}{most}{over}"

    @property
    def is_above(self) -> bool:
        """Whether the figure is above its limit."""
        return self.limit is not None and self.number > self.limit


def main() -> None:
    """Print the table."""
    above = False
    for figure in (*figures(), *loaded_figures("llama3-8b", "8xH100")):
        print(figure.line, flush=True)
        above |= figure.is_above
    sys.exit(above)


def figures() -> Iterator[Figure]:
    """Yield the figures that the files tell."""
    modules = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    tests = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    code = {path: lines for path, lines in modules.items() if path.name != "__init__.py"}
    core = {path: lines for path, lines in modules.items() if PACKAGE / "contrib" not in path.parents}
    longest = max(modules, key=modules.__getitem__)
    twice = {name: n for name, n in Counter(path.name for path in code).items() if n > 1}
    yield Figure(what="lines of the core", number=sum(core.values()), limit=MOST_LINES_OF_THE_CORE)
    yield Figure(what="lines in src", number=sum(modules.values()), limit=MOST_LINES_OF_ALL)
    yield Figure(what="modules in src", number=len(modules))
    yield Figure(what="median lines of a module", number=int(statistics.median(code.values())))
    name = longest.relative_to(SOURCE)
    yield Figure(what=f"lines of the largest module, {name}", number=modules[longest], limit=MOST_LINES)
    yield Figure(what=f"file names that occur twice{_listed(twice)}", number=len(twice), limit=0)
    for verb, number in parameters_by_verb().items():
        yield Figure(what=f"parameters of `{verb}`", number=number, limit=MOST_PARAMETERS)
    circles = circles_in(imports())
    yield Figure(what=f"circles among modules{_listed(map(' '.join, circles))}", number=len(circles), limit=0)
    circles = circles_in(imports_of_packages(imports()))
    yield Figure(
        what=f"circles among packages{_listed(map(' '.join, circles))}", number=len(circles), limit=0
    )
    into = imports_into_contrib()
    yield Figure(
        what=f"imports from the core into contrib, but the face{_listed(into)}", number=len(into), limit=0
    )
    yield Figure(what="test files", number=len(tests))
    yield Figure(what="lines in tests", number=sum(tests.values()))
    private = sum(map(_imports_private_modules, tests))
    yield Figure(what="test files that import private modules", number=private, limit=MOST_PRIVATE)
    rows = re.findall(r"^\| `meshwright ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    yield Figure(what="rows in README's table of commands", number=len(rows), limit=MOST_ROWS)


def _listed(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return f": {text}" if text else ""


def _imports_private_modules(path: Path) -> bool:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.module]
    return any(name.startswith("meshwright.") and "._" in name for name in names)


ROOMS_OF_VERBS = (
    "api.", "contrib.calibration._calibrate", "contrib.causes._reconcile_verb",
    "contrib.fleet_plans._fleet_plans", "contrib.sweeps._sweep",
)  # fmt: skip


def parameters_by_verb() -> dict[str, int]:
    """Return the number of parameters of each verb that the package exports."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(ROOMS_OF_VERBS):
            continue
        module = node.module or ""
        body = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text()).body
        names = {alias.name for alias in node.names}
        for function in body:
            if isinstance(function, ast.FunctionDef) and function.name in names:
                given = function.args
                found[function.name] = len(given.posonlyargs + given.args + given.kwonlyargs)
    return found


@cache
def _modules() -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    names = ((path.relative_to(SOURCE).with_suffix("").parts, path) for path in PACKAGE.rglob("*.py"))
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in names}


def _statements(body: Iterable[ast.stmt], *, late: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module that run with it; if `late`, those inside functions and for types too."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif late or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
            yield from _statements(inner if late else _direct(node), late=late)


def _direct(node: ast.stmt) -> list[ast.stmt]:
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def _imported(name: str, *, late: bool = False) -> set[str]:
    """Return the modules of ours that a module imports: the modules that define what it takes."""
    path, modules = _modules()[name], _modules()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in _statements(ast.parse(path.read_text()).body, late=late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
            continue
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names if base in modules else ():
            found.add(_home(base, alias.name))
    return found - {name}


@cache
def _home(module: str, name: str) -> str:
    """Return the module that defines a name which `module` may only pass on, as a package's face does."""
    modules = _modules()
    if f"{module}.{name}" in modules:
        return f"{module}.{name}"
    if modules[module].name != "__init__.py":
        return module
    for node in ast.walk(ast.parse(modules[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name) and f"{module}.{node.module}" in modules:
                    return _home(f"{module}.{node.module}", alias.name)
    return module


def imports() -> dict[str, set[str]]:
    """Return for each module the modules of ours that are imported as it is imported."""
    return {name: _imported(name) for name in _modules()}


def imports_of_packages(of_modules: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return for each package, and each module that is in none, those that it imports."""

    def room(name: str) -> str:
        parts = name.split(".")[1:]
        depth = 2 if parts[:1] in (["trainer"], ["contrib"]) else 1
        return ".".join(parts[:depth]) or "meshwright"

    found: dict[str, set[str]] = {}
    for name, others in of_modules.items():
        found.setdefault(room(name), set()).update({room(other) for other in others} - {room(name)})
    return found


def circles_in(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach each other, each sorted."""

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            for other in graph.get(waiting.pop(), set()) - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    below = {name: reached(name) for name in graph}
    groups = {
        tuple(sorted(other for other in below[name] if name in below.get(other, ())))
        for name in graph
        if name in below[name]
    }
    return [list(group) for group in sorted(groups)]


def imports_into_contrib() -> list[str]:
    """Return the modules outside contrib that import something of it, late or for types, but the face."""
    contrib = f"{PACKAGE.name}.contrib"
    outside = (name for name in _modules() if name != PACKAGE.name and not name.startswith(contrib))
    return [name for name in outside if any(each.startswith(contrib) for each in _imported(name, late=True))]


def loaded_figures(preset: str, fleet: str) -> Iterator[Figure]:
    """Yield how many modules of ours a weighing loads: at first, once it is cached, and in its worker."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_CACHE_DIR"] = folder
        weighs, most = f"modules that `weigh {preset} --on {fleet}` loads", MOST_LOADED
        yield Figure(what=f"{weighs} at first", number=len(loaded(preset, fleet)), limit=MOST_LOADED_COLD)
        yield Figure(what=f"{weighs} from the cache", number=len(loaded(preset, fleet)), limit=most)
        yield Figure(what=f"{weighs} in its worker", number=len(loaded_by_worker(preset, fleet)), limit=most)


def loaded(preset: str, fleet: str) -> list[str]:
    """Weigh a preset in another process, and return the modules of ours that it has loaded at the end."""
    return _printed(COMMAND, preset, fleet)


def loaded_by_worker(preset: str, fleet: str) -> list[str]:
    """Compile a preset as its worker does, in another process, and return the modules of ours it loads."""
    with tempfile.TemporaryDirectory() as work:
        _printed(REQUEST, preset, fleet, work)
        return _printed(WORKER, work)


def _printed(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def too_large() -> Iterator[str]:
    """Yield what is larger than CONTRIBUTING.md allows, in words."""
    for path in sorted(
        file
        for folder in ("src", "examples", "benchmarks", "docs/site")
        for file in (ROOT / folder).rglob("*.py")
    ):
        text, name = path.read_text(), path.relative_to(ROOT)
        if (lines := len(text.splitlines())) > MOST_LINES:
            yield f"{name}: {lines} lines, and a module has {MOST_LINES} at most: split it along its ideas"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = _lines_of(node)
                if lines > MOST_LINES_OF_A_FUNCTION:
                    yield f"{name}:{node.lineno}: {node.name} has {lines} lines, above 60: split it"
    for verb, number in parameters_by_verb().items():
        if number > MOST_PARAMETERS:
            yield f"{verb} has {number} parameters, above {MOST_PARAMETERS}: make one record of some of them"


def _lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function, without its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        found = list(too_large())
        print("\n".join(found) or "sizes: all modules, functions and verbs are small enough")
        sys.exit(bool(found))
    main()
