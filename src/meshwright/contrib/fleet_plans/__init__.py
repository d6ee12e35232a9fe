"""Plan for several fleets side by side, for the smallest fleet that suffices, and for what would make it fit.

Imports: `planned`, `programs`, `report`, `cli`. Used by: users, as `mw.plan_fleets`; `api` and `cli`, by the
entry point; `contrib.changes`, for fleets of other sizes.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._fleet_plans import FleetPlans as FleetPlans
    from ._fleet_plans import compare as compare
    from ._fleet_plans import plan_fleets as plan_fleets
    from ._fleet_sizes import fleet_times as fleet_times
    from ._fleet_sizes import smaller_fleets as smaller_fleets
    from ._fleet_sizes import smallest as smallest
    from ._what_would_fit import what_would_fit as what_would_fit

__getattr__, __dir__ = names_on_first_use(__name__)
