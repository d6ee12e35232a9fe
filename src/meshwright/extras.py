"""Say how to install an extra's packages, and check that they are there. No other module words this.

Meshwright is on no package index: to ask one for its name would bring whatever a stranger calls so. What
works is an installation from a clone, in the folder that holds its pyproject.toml.

Imports: `errors`. Used by: whatever needs a package that the core does not bring.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from .errors import InputError

PURPOSES = {
    "nvidia": "weigh for NVIDIA GPUs",
    "cuda": "run on an attached NVIDIA GPU",
    "tpu": "weigh for TPUs",
    "train": "train, and read checkpoints",
    "draw": "draw the curves of pages",
    "torch": "weigh and account PyTorch modules",
    "huggingface": "weigh any model that transformers knows",
    "tokenizers": "read a tokenizer.json",
    "parquet": "read Parquet files",
    "check": "write figures into a file of budgets",
    "jobs": "read and write job files of Kubernetes and SkyPilot",
    "watch": "watch runs on a page",
    "wandb": "report runs to Weights & Biases",
    "mlflow": "report runs to MLflow",
    "trackio": "report runs to Trackio",
    "prices": "refresh list prices",
    "programs": "run examples/programs",
}
"""By extra of pyproject.toml: what it is for. Extras for work on Meshwright itself are left out."""


def command(extra: str) -> str:
    """Return the command that installs an extra, to be typed in the folder of a clone.

    >>> command("nvidia")
    "pip install -e '.[nvidia]'"
    """
    assert extra in PURPOSES, extra
    return f"pip install -e '.[{extra}]'"


def how_to_install(extra: str) -> str:
    """Return the start of a hint: where to type which command.

    >>> how_to_install("parquet")
    "in your clone of Meshwright: pip install -e '.[parquet]'"
    """
    return f"in your clone of Meshwright: {command(extra)}"


def absent(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the top-level modules in `modules` that are not installed, without importing any."""
    return tuple(name for name in modules if importlib.util.find_spec(name) is None)


def not_installed(extra: str, modules: Sequence[str], purpose: str) -> InputError:
    """Return the error that some packages are absent. `purpose`: "training", "a checkpoint"."""
    are = "are" if len(modules) > 1 else "is"
    return InputError(
        f"{purpose} needs {' and '.join(modules)}, which {are} not installed", hint=how_to_install(extra)
    )


def check_installed(extra: str, modules: Sequence[str], purpose: str) -> None:
    """Check that an extra's modules are installed, before any work is done.

    Raises:
        InputError: some are not.
    """
    if missing := absent(modules):
        raise not_installed(extra, missing, purpose)
