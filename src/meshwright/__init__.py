"""Meshwright: what a training run costs before the machines are rented, and then the run itself.

`import meshwright as mw; mw.weigh("llama3-8b", on="8xH100")`. Names are imported on first use, so
that `meshwright --help` loads nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api._explain import Change as Change
    from .api._explain import explain as explain
    from .api._sweep import sweep as sweep
    from .api._train import Run as Run
    from .api._train import train as train
    from .api._weigh import Weighing as Weighing
    from .api._weigh import weigh as weigh
    from .config import RunConfig as RunConfig
    from .errors import CompileError as CompileError
    from .errors import InputError as InputError
    from .errors import MeshwrightError as MeshwrightError
    from .hardware import Fleet as Fleet
    from .ledger import Call as Call
    from .ledger import Work as Work
    from .ledger import register_call as register_call
    from .measure import clock as clock
    from .measure import footprint as footprint
    from .measure import live as live
    from .measure import matmul_mfu as matmul_mfu
    from .measure import memory as memory
    from .measure import probe as probe
    from .report import Sweep as Sweep
    from .report import SweepRun as SweepRun
    from .sharding import sharding_errors as sharding_errors
    from .torch_account import account_torch as account_torch

_HOMES = {
    "Change": "api._explain",
    "explain": "api._explain",
    "sweep": "api._sweep",
    "Run": "api._train",
    "train": "api._train",
    "Weighing": "api._weigh",
    "weigh": "api._weigh",
    "RunConfig": "config",
    "account_torch": "torch_account",
    "CompileError": "errors",
    "InputError": "errors",
    "MeshwrightError": "errors",
    "Fleet": "hardware",
    "Call": "ledger",
    "Work": "ledger",
    "register_call": "ledger",
    "clock": "measure",
    "footprint": "measure",
    "live": "measure",
    "matmul_mfu": "measure",
    "memory": "measure",
    "probe": "measure",
    "Sweep": "report",
    "SweepRun": "report",
    "sharding_errors": "sharding",
}
__all__ = [
    "Call",
    "Change",
    "CompileError",
    "Fleet",
    "InputError",
    "MeshwrightError",
    "Run",
    "RunConfig",
    "Sweep",
    "SweepRun",
    "Weighing",
    "Work",
    "account_torch",
    "clock",
    "explain",
    "footprint",
    "live",
    "matmul_mfu",
    "memory",
    "probe",
    "register_call",
    "sharding_errors",
    "sweep",
    "train",
    "weigh",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"meshwright.{_HOMES[name]}"), name)
