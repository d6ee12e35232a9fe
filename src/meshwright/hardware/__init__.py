"""Describe chips, links and fleets: their rates and sizes, and the facts that a compiler needs about them.

Imports: `errors`, `formats`, `json_records`; no jax. Used by: everything that weighs, predicts, plans or
trains. Every figure is in catalog.toml with its source. Names are matched whole, never by substring.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._calibration import COLLECTIVE_KINDS as COLLECTIVE_KINDS
    from ._calibration import Calibration as Calibration
    from ._calibration import MeasuredAttention as MeasuredAttention
    from ._calibration import MeasuredCollective as MeasuredCollective
    from ._calibration import measured_attention as measured_attention
    from ._chip import CATALOG as CATALOG
    from ._chip import GIB as GIB
    from ._chip import KERNEL_CAPABILITY as KERNEL_CAPABILITY
    from ._chip import KERNEL_WIDTH as KERNEL_WIDTH
    from ._chip import Chip as Chip
    from ._chip import Link as Link
    from ._chip import Slices as Slices
    from ._chip import Target as Target
    from ._chip import chip_of_device_kind as chip_of_device_kind
    from ._chip import find_chip as find_chip
    from ._chip import memory_fraction as memory_fraction
    from ._chip import rendered_target as rendered_target
    from ._fleet import Fleet as Fleet
    from ._fleet import check_compilable as check_compilable
    from ._fleet import chip_named as chip_named
    from ._fleet import fleet_reading as fleet_reading
    from ._fleet import gpu_description as gpu_description
    from ._fleet import pool_bytes as pool_bytes
    from ._fleet import split_reserve as split_reserve
    from ._fleet import target_config as target_config
    from ._fleet import topology_arguments as topology_arguments
    from ._fleet import why_simulated as why_simulated
    from ._measured_runs import LONGEST_STEP_SECONDS as LONGEST_STEP_SECONDS
    from ._measured_runs import SHORTEST_STEP_SECONDS as SHORTEST_STEP_SECONDS
    from ._measured_runs import STEP_TIME as STEP_TIME
    from ._measured_runs import TRACE as TRACE
    from ._measured_runs import MeasuredClass as MeasuredClass
    from ._measured_runs import MeasuredRun as MeasuredRun
    from ._measured_runs import MeasuredRuns as MeasuredRuns

__getattr__, __dir__ = names_on_first_use(__name__)
