"""Meshwright: what a training run costs before the machines are rented, and then the run itself.

Names are imported on first use, so that `meshwright --help` loads nothing. Importing this keeps JAX from
printing a traceback where its plugin for NVIDIA is installed and no GPU is (`plugins`).

>>> import meshwright as mw
>>> weighing = mw.weigh("linear", on="8xH100")
>>> weighing.fits
True
"""

import sys
from typing import TYPE_CHECKING

from .lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from .api._plan import plan as plan
    from .api._train import Session as Session
    from .api._train import train as train
    from .api._weigh import weigh as weigh
    from .compiler import KernelCall as KernelCall
    from .compiler import KernelFlops as KernelFlops
    from .compiler import register_kernel as register_kernel
    from .config import RunConfig as RunConfig
    from .contrib.calibration._calibrate import MeasuredStep as MeasuredStep
    from .contrib.calibration._calibrate import calibrate as calibrate
    from .contrib.calibration._calibrated import Calibrated as Calibrated
    from .contrib.causes import Gap as Gap
    from .contrib.causes._reconcile_verb import reconcile as reconcile
    from .contrib.changes import Largest as Largest
    from .contrib.changes import explain as explain
    from .contrib.changes import largest as largest
    from .contrib.check import Check as Check
    from .contrib.check import Difference as Difference
    from .contrib.check import check as check
    from .contrib.check import diff as diff
    from .contrib.explain import Explanation as Explanation
    from .contrib.explain import explain_file as explain_file
    from .contrib.finishing import Operations as Operations
    from .contrib.fleet_plans import FleetPlans as FleetPlans
    from .contrib.fleet_plans._fleet_plans import plan_fleets as plan_fleets
    from .contrib.gate import Gate as Gate
    from .contrib.gate import Limits as Limits
    from .contrib.gate import Reading as Reading
    from .contrib.gate import gate as gate
    from .contrib.instruments import clock as clock
    from .contrib.instruments import footprint as footprint
    from .contrib.instruments import live as live
    from .contrib.instruments import matmul_mfu as matmul_mfu
    from .contrib.instruments import memory as memory
    from .contrib.jax_steps import abstract as abstract
    from .contrib.jax_steps import jax_step as jax_step
    from .contrib.jax_steps import place as place
    from .contrib.runs import Comparison as Comparison
    from .contrib.runs import RunRecord as RunRecord
    from .contrib.runs import Runs as Runs
    from .contrib.runs import compare as compare
    from .contrib.runs import runs as runs
    from .contrib.scripts import script as script
    from .contrib.sharding_words import sharding_errors as sharding_errors
    from .contrib.sweeps import Sweep as Sweep
    from .contrib.sweeps import SweepRun as SweepRun
    from .contrib.sweeps._sweep import sweep as sweep
    from .contrib.torch import torch_step as torch_step
    from .contrib.torch_as_jax import module_as_jax as module_as_jax
    from .errors import CompileError as CompileError
    from .errors import InputError as InputError
    from .errors import MeshwrightError as MeshwrightError
    from .hardware import Fleet as Fleet
    from .ledger import CustomCall as CustomCall
    from .ledger import MultiplyAdds as MultiplyAdds
    from .ledger import register_call as register_call
    from .measure import probe as probe
    from .planned import Plan as Plan
    from .planned import Planned as Planned
    from .programs import Program as Program
    from .programs import RunLength as RunLength
    from .programs import load as load
    from .results import Change as Change
    from .results import Run as Run
    from .results import Weighing as Weighing


def _quiet_jax_plugins() -> None:
    if getattr(sys, "argv", [])[:1] == ["-m"]:  # `python -m meshwright` does so itself, once it has left
        return  # the working directory out of the module path: a file logging.py there is not ours to run
    from .plugins import quiet_jax_plugins

    quiet_jax_plugins()


_quiet_jax_plugins()
__getattr__, __dir__ = names_on_first_use(__name__)
