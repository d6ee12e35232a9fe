"""Fit predictions to measured steps, and read the traces of JAX's and PyTorch's profilers.

A trace is a stranger's file: nothing of it is executed. Imports: all of the core. Used by: users, through
`meshwright calibrate` and `mw.calibrate`; `contrib.causes`, which reads traces too.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._calibrate import forget as forget
    from ._calibrate import measured_steps_in as measured_steps_in
    from ._calibrated import Calibrated as Calibrated
    from ._calibrated import CalibratedClass as CalibratedClass
    from ._calibrated import CalibratedStep as CalibratedStep
    from ._chrome_events import ChromeEvent as ChromeEvent
    from ._chrome_events import ChromeTrace as ChromeTrace
    from ._factor_fit import fit_factors as fit_factors
    from ._rates_report import calibration_document as calibration_document
    from ._trace_files import class_of_kernel as class_of_kernel
    from ._trace_files import is_xplane as is_xplane
    from ._trace_files import stats_of as stats_of
    from ._trace_files import xplane_events as xplane_events
    from ._trace_files import xplane_files as xplane_files
    from ._trace_files import xplane_planes as xplane_planes
    from ._traces import MESSAGES as MESSAGES
    from ._traces import TraceEvent as TraceEvent
    from ._traces import kineto_step as kineto_step
    from ._traces import traced_step as traced_step

__getattr__, __dir__ = names_on_first_use(__name__)
