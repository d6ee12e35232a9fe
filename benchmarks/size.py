"""Print how large the code is: modules, lines, their median, and what the tests import.

Run: python benchmarks/size.py [--check]. Needs nothing but Python. Lines are all lines, blank ones and
docstrings too. --check (as `make lint`) prints each module of more than 700 lines and each function of more
than 60 without its docstring, and ends with status 1 if there is one.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 700, 60


def main() -> None:
    """Print the table."""
    modules = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    tests = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    code = {path: lines for path, lines in modules.items() if path.name != "__init__.py"}
    private = [path for path in tests if _imports_private_modules(path)]
    longest = max(modules, key=modules.__getitem__)
    for what, number in (
        ("modules in src", len(modules)),
        ("lines in src", sum(modules.values())),
        ("median lines of a module", int(statistics.median(modules.values()))),
        ("median without __init__", int(statistics.median(code.values()))),
        (f"longest module ({longest.relative_to(ROOT / 'src')})", modules[longest]),
        ("modules under 60 lines, without __init__", sum(lines < 60 for lines in code.values())),
        ("test files", len(tests)),
        ("lines in tests", sum(tests.values())),
        ("test files that import private modules", len(private)),
    ):
        print(f"{number:8,}  {what}")


def _imports_private_modules(path: Path) -> bool:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.module]
    return any(name.startswith("meshwright.") and "._" in name for name in names)


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


def _lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function, without its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        found = list(too_large())
        print("\n".join(found) or "sizes: all modules and functions are small enough")
        sys.exit(bool(found))
    main()
