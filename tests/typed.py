"""A pytest plugin, `-p tests.typed`: check annotations, of arrays too, as functions are called.

`make test-again` uses it; the checks take a tenth of the time, so `make test` leaves them out. Plugins are
loaded before tests/conftest.py, so before anything of the package. jaxtyping's own option does the same for
a list of modules on the command line; this list follows the tree.
"""

from __future__ import annotations

from pathlib import Path

from jaxtyping import install_import_hook

ROOMS = ("context_attention", "muon", "pipelines", "state_mixers", "toy_models")
MODELS = Path(__file__).parents[1] / "src/meshwright/trainer/models"

install_import_hook(
    [f"meshwright.{package}" for package in ("sharding", "trainer.step", "measure", "trainer.loop")]
    + [f"meshwright.contrib.{room}" for room in ROOMS]
    + [f"meshwright.trainer.models.{path.stem}" for path in MODELS.glob("[!_]*.py")],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
