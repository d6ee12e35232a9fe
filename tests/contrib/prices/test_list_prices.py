"""List prices: what the table says, and which one is chosen."""

from __future__ import annotations

import datetime
import tomllib
from importlib.resources import files

import pytest

from meshwright.contrib.prices import list_price, list_prices
from meshwright.errors import InputError
from meshwright.hardware import CATALOG

TODAY = datetime.date(2026, 11, 22)


# The table


def test_every_price_has_a_provider_a_day_and_pages_that_can_be_looked_up():
    found = [listing for name in CATALOG for listing in list_prices(name)]
    assert len(found) > 40
    for listing in found:
        assert listing.chip in CATALOG
        assert listing.provider
        assert "$" in listing.listed
        assert datetime.date(2024, 1, 1) < listing.date < TODAY
        assert listing.source.startswith("https://")
        assert listing.read_in.startswith("https://")
        assert 0.1 < listing.usd_per_device_hour < 20


def test_the_price_of_a_device_is_that_of_its_host_divided_by_its_devices():
    # The figures of prices.toml, from the words in which the providers state them.
    tables = tomllib.loads(files("meshwright.contrib.prices").joinpath("prices.toml").read_text())
    for row in [row for table in tables.values() for row in table["prices"]]:
        dollars = float(row["listed"].partition("$")[2].split("/")[0].split()[0])
        for_all = "GPUs, " in row["listed"] and row["listed"].endswith("per hour")
        count = int(row["listed"].split(" GPUs, ")[0].split()[-1]) if for_all else 1
        assert row["usd_per_device_hour"] == pytest.approx(dollars / count, abs=1e-4), row


def test_the_lower_median_of_the_providers_is_chosen():
    price = list_price("H100", TODAY)
    assert price is not None
    among = [listing.usd_per_device_hour for listing in price.among]
    assert among == sorted(among)
    assert len({listing.provider for listing in price.among}) == len(among) == 8
    assert price.usd_per_device_hour == among[3] == 3.99
    assert (price.provider, price.currency) == (price.chosen.provider, "USD")


def test_a_price_says_what_it_is_where_it_was_and_when():
    price = list_price("MI300X", TODAY)
    assert price is not None
    assert price.words == (
        "$2.59 per MI300X and hour, the list price of DigitalOcean of 2026-10-08 "
        "(https://www.digitalocean.com/pricing/gpu-droplets), the lower median of 2 providers: "
        "from $2.59 (DigitalOcean, 2026-10-08) to $3.45 (Crusoe, 2026-09-20)"
    )


def test_an_old_price_says_so():
    price = list_price("tpu-v5p", TODAY)
    assert price is not None
    assert (price.age_days, price.is_old) == (699, True)
    assert price.words.endswith("This price is 699 days old: look up the present one, and give it yourself")
    day = price.date + datetime.timedelta(days=90)
    on_the_last_day, after = list_price("v5p", day), list_price("v5p", day + datetime.timedelta(days=1))
    assert on_the_last_day is not None
    assert after is not None
    assert (on_the_last_day.is_old, after.is_old) == (False, True)
    assert "old" not in on_the_last_day.words


def test_a_chip_without_a_price_has_none_and_an_unknown_chip_is_refused():
    assert list_price("H800", TODAY) is None
    assert list_price("CPU", TODAY) is None
    with pytest.raises(InputError, match="unknown chip 'H1000'"):
        list_price("H1000", TODAY)
