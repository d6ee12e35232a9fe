"""Read list prices of chips, each with its provider, day and source, and choose one of them.

Prices come from prices.toml, and from a table that `refresh_prices` has written, if one is given. Of one
provider's prices of a chip only the newest counts. Of several providers' prices the lower median is chosen.
It is a price at which somebody rents the chip out, and one very cheap or dear provider does not move it; the
lowest would promise what often is not available. A price says its age, and is never left out for it: an old
price that says so is of more use than none.

Not counted: spot and reserved prices, discounts, storage, traffic, taxes; regions are the provider's cheapest
or the usual one, as `listed` says.

Used by: `api`, by the entry point; users; `contrib.gate`, `contrib.runs`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.compiler import cache_root
from meshwright.errors import InputError
from meshwright.files import MOST_TOML_BYTES, parsed_toml, read_text, reason
from meshwright.hardware import CATALOG, Fleet, find_chip

OLD_DAYS = 90
"""The age in days from which a price is called old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One provider's on-demand price of one JAX device.

    `listed`: how the provider states it. `source`: its page. `read_in`: the transcript of that page in which
    the price was read; "" if it was read at the source.
    """

    chip: str
    provider: str
    usd_per_device_hour: float
    date: datetime.date
    listed: str
    source: str
    read_in: str = ""

    def __post_init__(self) -> None:
        price = self.usd_per_device_hour
        if not math.isfinite(price) or price <= 0:
            raise ValueError(f"usd_per_device_hour = {price} is not a positive number")
        if self.chip not in CATALOG:
            raise ValueError(f"no chip of the catalog is called {self.chip!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A chip's list price, as seen today: one provider's, and all that it was chosen from, cheapest first."""

    chosen: Listing
    among: tuple[Listing, ...]
    today: datetime.date

    @property
    def provider(self) -> str:
        """The provider whose price it is."""
        return self.chosen.provider

    @property
    def currency(self) -> str:
        """Always US dollars."""
        return "USD"

    @property
    def usd_per_device_hour(self) -> float:
        """The price of one JAX device for an hour."""
        return self.chosen.usd_per_device_hour

    @property
    def date(self) -> datetime.date:
        """The day on which the price stood at its source."""
        return self.chosen.date

    @property
    def source(self) -> str:
        """The provider's page."""
        return self.chosen.source

    @property
    def age_days(self) -> int:
        """The days from the price's date to today."""
        return (self.today - self.date).days

    @property
    def is_old(self) -> bool:
        """Return whether the price is older than `OLD_DAYS`."""
        return self.age_days > OLD_DAYS

    @property
    def _ends(self) -> tuple[Listing, Listing]:
        return self.among[0], self.among[-1]

    @property
    def words(self) -> str:
        """The price, its provider, date, source and age, and the prices that it was chosen from."""
        what = f"{_dollars(self.chosen)} per {self.chosen.chip} and hour"
        text = f"{what}, the list price of {self.provider} of {self.date} ({self.source})"
        if len(self.among) > 1:
            low, high = (f"{_dollars(each)} ({each.provider}, {each.date})" for each in self._ends)
            median = "median" if len(self.among) % 2 else "lower median"
            text += f", the {median} of {len(self.among)} providers: from {low} to {high}"
        if self.is_old:
            text += f". This price is {self.age_days} days old: look up the present one, and give it yourself"
        return text


def _dollars(listing: Listing) -> str:
    return f"${listing.usd_per_device_hour:.2f}"


def list_price(chip_name: str, today: datetime.date, *, refreshed: Path | None = None) -> Price | None:
    """Return the list price of one device of a chip, the lower median of its providers; None if unknown.

    Args:
        chip_name: the chip's name, or any other that `find_chip` knows.
        today: the day for which the price's age is told.
        refreshed: a file that `refresh_prices` has written. It need not exist.

    Raises:
        InputError: no chip has that name, or the refreshed file cannot be read.

    >>> price = list_price("v5p", datetime.date(2026, 11, 22))
    >>> price.provider, price.usd_per_device_hour, price.age_days, price.is_old
    ('Google Cloud', 4.2, 699, True)
    """
    among = list_prices(chip_name, refreshed=refreshed)
    return Price(chosen=among[(len(among) - 1) // 2], among=among, today=today) if among else None


def with_list_price(fleet: Fleet) -> tuple[Fleet, str]:
    """Return the fleet with today's list price if one is known, and where that price comes from."""
    today = datetime.datetime.now(datetime.UTC).date()
    found = list_price(fleet.chip.name, today, refreshed=cache_root() / "prices.toml")
    if found is None:
        return fleet, ""
    return dataclasses.replace(fleet, price_per_device_hour=found.usd_per_device_hour), found.words


def list_prices(chip_name: str, *, refreshed: Path | None = None) -> tuple[Listing, ...]:
    """Return the newest price of every provider that rents out a chip, cheapest first.

    Raises:
        InputError: no chip has that name, or the refreshed file cannot be read.

    >>> [listing.provider for listing in list_prices("MI300X")]
    ['DigitalOcean', 'Crusoe']
    """
    name = find_chip(chip_name).name
    newest: dict[str, Listing] = {}
    for listing in (*_shipped(), *_of_file(refreshed)):
        known = newest.get(listing.provider)
        if listing.chip == name and (known is None or known.date <= listing.date):
            newest[listing.provider] = listing
    return tuple(sorted(newest.values(), key=lambda each: (each.usd_per_device_hour, each.provider)))


@functools.cache
def _shipped() -> tuple[Listing, ...]:
    text = files("meshwright.contrib.prices").joinpath("prices.toml").read_text(encoding="utf-8")
    return listings_of(text)


def _of_file(path: Path | None) -> tuple[Listing, ...]:
    """Return the prices of a refreshed table; none if there is no such file."""
    if path is None or not path.exists():
        return ()
    try:
        return listings_of(read_text(path, MOST_TOML_BYTES))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as broken:
        raise InputError(
            f"the refreshed prices in {path} cannot be read: {reason(broken)}",
            hint="refresh them again, or delete the file: the prices that Meshwright brings remain",
        ) from broken


def listings_of(text: str) -> tuple[Listing, ...]:
    """Return the prices of a table in the format of prices.toml.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the text has another format.
    """
    listings: list[Listing] = []
    for table in parsed_toml(text).values():
        common: dict[str, Any] = {key: table[key] for key in ("provider", "date", "source")}
        if type(common["date"]) is not datetime.date:
            raise ValueError(f"{common['date']!r} is not a day")
        common["read_in"] = table.get("read_in", "")
        listings += [Listing(**row, **common) for row in table["prices"]]
    return tuple(listings)
