"""A pytest plugin, `-p tests.typed`: check annotations, of arrays too, as functions are called.

Loaded before tests/conftest.py, so that nothing of the package has been imported. `make test-typed` uses it; the
checks take a tenth of the time, so the other runs leave them out. Not jaxtyping's own option, which imports
what it reads before it looks at this folder's settings and takes no list that follows the tree.
"""

from __future__ import annotations

from pathlib import Path

from jaxtyping import install_import_hook

MODELS = Path(__file__).parents[1] / "src/meshwright/models"

install_import_hook(
    [f"meshwright.{package}" for package in ("sharding", "step", "measure", "training")]
    + [f"meshwright.models.{path.stem}" for path in MODELS.glob("[!_]*.py")],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
