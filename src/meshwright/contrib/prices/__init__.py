"""Know the list prices of chips, and refresh them from the catalogs of a public collector (extra `prices`).

Every price is in prices.toml. Imports: `hardware`, `compiler` (where the cache is), `extras`, `errors`. Used
by: `api`, by the entry point; users, as `meshwright.contrib.prices`; `contrib.gate`, `contrib.runs`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._list_prices import Listing as Listing
    from ._list_prices import Price as Price
    from ._list_prices import list_price as list_price
    from ._list_prices import list_prices as list_prices
    from ._list_prices import listings_of as listings_of
    from ._list_prices import with_list_price as with_list_price
    from ._price_refresh import refresh_prices as refresh_prices

__getattr__, __dir__ = names_on_first_use(__name__)
