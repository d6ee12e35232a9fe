"""Print how large the code is: modules, lines, their median, and what the tests import.

Run: python benchmarks/size.py. Needs nothing but Python. Lines are all lines, blank ones and docstrings too.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent


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


if __name__ == "__main__":
    main()
