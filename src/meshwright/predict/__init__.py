"""Predict the time of a step by a walk over the compiled schedule, with models of kernels and collectives.

Imports: `compiler` (its record only), `hardware`, `hlo`, `ledger`, `errors`, `formats`, `units`, numpy. No
jax, no clock. Used by: `planning`, `measure`, `eager`, `results`, `planned`, `programs`, `report`.
Coefficients: rates.toml, written by benchmarks/fit_rates.py, and runs.toml.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._busy import NUM_SPANS as NUM_SPANS
    from ._busy import busy_of as busy_of
    from ._dispatch import copies_once as copies_once
    from ._factors import RECOMPUTED as RECOMPUTED
    from ._factors import TAIL as TAIL
    from ._factors import TAIL_OF_NOISE as TAIL_OF_NOISE
    from ._factors import Factor as Factor
    from ._factors import Factors as Factors
    from ._factors import Prior as Prior
    from ._factors import class_of as class_of
    from ._formulas import AttentionRate as AttentionRate
    from ._formulas import CollectiveRate as CollectiveRate
    from ._formulas import GemmRate as GemmRate
    from ._formulas import attention_seconds as attention_seconds
    from ._formulas import collective_seconds as collective_seconds
    from ._formulas import gemm_seconds as gemm_seconds
    from ._kernel_prices import Transfer as Transfer
    from ._kernel_prices import bytes_by_memory as bytes_by_memory
    from ._kernel_prices import kernel_of as kernel_of
    from ._kernel_prices import transfer_of as transfer_of
    from ._links import AxisTraffic as AxisTraffic
    from ._links import hidden_share as hidden_share
    from ._links import traffic_by_axes as traffic_by_axes
    from ._predict import classes_of_instructions as classes_of_instructions
    from ._predict import predict as predict
    from ._predict import predicted_busy as predicted_busy
    from ._predict import predicted_trace as predicted_trace
    from ._predict import prediction_of as prediction_of
    from ._predict import what_helps as what_helps
    from ._prediction_records import Busy as Busy
    from ._prediction_records import Interval as Interval
    from ._prediction_records import Prediction as Prediction
    from ._prediction_records import RunFlops as RunFlops
    from ._prediction_records import RunTotal as RunTotal
    from ._prediction_records import Slice as Slice
    from ._prediction_records import Speedup as Speedup
    from ._prediction_records import checked_price as checked_price
    from ._prediction_records import run_flops as run_flops
    from ._prediction_records import run_total as run_total
    from ._prediction_records import steps_for as steps_for
    from ._prediction_records import whole_run as whole_run
    from ._rate_files import runs as runs
    from ._rates import Machine as Machine
    from ._rates import ends_with_waits as ends_with_waits
    from ._rates import launched_one_by_one as launched_one_by_one
    from ._rates import machine_of as machine_of
    from ._rates import names_of as names_of
    from ._rates import prior_of as prior_of
    from ._rates import rates_digest as rates_digest
    from ._rates import shared as shared
    from ._rates import sustained_share as sustained_share
    from ._rates import widths as widths
    from ._walk import LAUNCH as LAUNCH
    from ._walk import TRACKS as TRACKS
    from ._walk import WAIT as WAIT
    from ._walk import Event as Event
    from ._walk import Walked as Walked
    from ._walk import trace_of as trace_of
    from ._walk import walk as walk

__getattr__, __dir__ = names_on_first_use(__name__)
