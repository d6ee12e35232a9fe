"""Refresh the list prices of chips from the catalogs of a public collector (extra `prices`).

Imports: `hardware`, `extras`, `errors`. Used by: users, as `meshwright.contrib.prices.refresh_prices`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._price_refresh import refresh_prices as refresh_prices

__getattr__, __dir__ = names_on_first_use(__name__)
