"""Refresh the list prices from gpuhunt's catalogs, which dstack publishes daily (extra `prices`).

gpuhunt (https://github.com/dstackai/gpuhunt) downloads one catalog for each provider. Its version begins with
the day on which it was collected, and that day becomes the prices' date: a provider whose collection fails
keeps its old catalog, and its prices must not look new. A catalog without such a version is left out.

A price counts if it is certain which chip it is for. gpuhunt's "A100", "H100" and "V100" are SXM modules and
PCIe cards; the instance's name tells them apart, or the price is left out. Of one provider's instances with a
chip those with the most of them count, up to a whole host, in the cheapest region. Spot prices and
marketplaces (Vast.ai and the like) are left out.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import InputError, MeshwrightError
from meshwright.extras import how_to_install
from meshwright.hardware import CATALOG, GIB, Chip, chip_named

from ._list_prices import Listing, listings_of


class CatalogItem(Protocol):
    """Holds what is read of `gpuhunt.CatalogItem`: an instance, its dollars per hour, its devices."""

    instance_name: str
    location: str
    price: float
    gpu_count: int
    gpu_name: str | None
    gpu_memory: float | None
    spot: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """Holds the prices that a refresh has written, and why each provider left out was left out."""

    path: Path
    listings: tuple[Listing, ...]
    left_out: dict[str, str]


_PROVIDERS = {
    "aws": "AWS",
    "azure": "Azure",
    "gcp": "Google Cloud",
    "lambdalabs": "Lambda",
    "nebius": "Nebius",
    "oci": "Oracle Cloud",
    "runpod": "RunPod",
    "verda": "Verda",
}
_CATALOGS = "https://dstack-gpu-pricing.s3.eu-west-1.amazonaws.com/v3"  # gpuhunt's CATALOG_URL
# gpuhunt's names that mean one chip of our catalog.
_CHIPS = {
    "T4": "T4",
    "A10": "A10",
    "A10G": "A10G",
    "A6000": "A6000",
    "L4": "L4",
    "L40S": "L40S",
    "RTX3090": "RTX-3090",
    "RTX4090": "RTX-4090",
    "RTX5090": "RTX-5090",
    "RTXPRO6000": "RTX-PRO-6000",
    "H100NVL": "H100-NVL",
    "H200": "H200",
    "H200NVL": "H200-NVL",
    "GH200": "GH200",
    "B200": "B200",
    "GB200": "GB200",
    "B300": "B300",
    "GB300": "GB300",
    "MI300X": "MI300X",
    "MI325X": "MI325X",
    "MI350X": "MI350X",
    "MI355X": "MI355X",
}
# gpuhunt's names that mean several: modules by memory in GB, and cards.
_MODULES = {
    "V100": {16: "V100-16GB", 32: "V100-32GB"},
    "A100": {40: "A100-40GB", 80: "A100-80GB"},
    "H100": {80: "H100"},
}
_CARDS = {"A100": {40: "A100-PCIe-40GB", 80: "A100-PCIe-80GB"}, "H100": {80: "H100-PCIe"}}
# Instances with SXM modules: by their own words, or the families of AWS, Azure, Google, Oracle.
_IS_MODULE = re.compile(r"sxm|hbm3|^p[345]|^standard_nd|^a[23]-|^bm\.gpu", re.IGNORECASE)
_NEAR = 0.15  # gpuhunt's sizes are those on the box; the catalog's are what the runtime reports


def refresh_prices(path: Path, *, catalogs: Mapping[str, Any] | None = None) -> Refreshed:
    """Write the present list prices to a file that `list_price` reads, and return them.

    Args:
        path: the file. It is replaced only when the new prices are complete.
        catalogs: gpuhunt's catalogs by provider, each with `version` and `items`; None downloads them.

    Raises:
        InputError: gpuhunt is not installed.
        MeshwrightError: the catalogs cannot be downloaded or hold no price, or the file cannot be written.
    """
    found, left_out = _tables(_downloaded() if catalogs is None else catalogs)
    if not found:
        why = "; ".join(f"{provider}: {reason}" for provider, reason in left_out.items())
        hint = "the file is unchanged; look for a newer release of gpuhunt"
        raise MeshwrightError(f"gpuhunt's catalogs hold no price that can be used ({why})", hint=hint)
    text = "# Written by refresh_prices from gpuhunt's catalogs; in the format of Meshwright's prices.toml.\n"
    text += "\n".join(found)
    listings = listings_of(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_name(f".{path.name}.{os.getpid()}")
        making.write_text(text, encoding="utf-8")
        making.replace(path)
    except OSError as refused:
        hint = "make room or give permission there"
        raise MeshwrightError(
            f"the prices cannot be written to {path}: {refused.strerror}", hint=hint
        ) from refused
    return Refreshed(path=path, listings=listings, left_out=left_out)


def _downloaded() -> Mapping[str, Any]:
    """Return gpuhunt's newest catalogs. gpuhunt logs providers that fail; they are missing in the result."""
    import logging

    try:
        gpuhunt: Any = importlib.import_module("gpuhunt")  # the extra `prices`
    except ModuleNotFoundError as missing:
        raise InputError(
            "prices are refreshed from gpuhunt, which is not installed", hint=how_to_install("prices")
        ) from missing
    catalog = gpuhunt.Catalog()
    logging.getLogger("gpuhunt").setLevel(logging.CRITICAL)  # its tracebacks; `left_out` tells the same
    try:
        catalog.load()
    except Exception as failed:  # gpuhunt's own error, or any of the network
        cause = failed.__cause__ or failed
        hint = "try again with a connection, or give the price yourself"
        raise MeshwrightError(f"gpuhunt could not download its catalogs: {cause}", hint=hint) from failed
    return catalog.catalog


def _tables(catalogs: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return one table of TOML for each provider, and the reasons for those without."""
    found: list[str] = []
    left_out = {name: "not downloaded" for name in _PROVIDERS if name not in catalogs}
    for name, catalog in catalogs.items():
        date = _day(catalog.version)
        best = _best([item for item in catalog.items if not _is_marketplace(name, item)])
        if name not in _PROVIDERS:
            left_out[name] = "not a provider with list prices"
        elif date is None:
            left_out[name] = f"the version {catalog.version!r} names no day"
        elif not best:
            left_out[name] = "no on-demand price of a known chip"
        else:
            source = f"{_CATALOGS}/{name}/{catalog.version}/catalog.zip"
            found.append(_table(name, date, source, best))
    return found, left_out


def _day(version: str) -> datetime.date | None:
    """Return the day in a version such as "20260818-42"."""
    match = re.match(r"(\d{4})(\d\d)(\d\d)(?!\d)", version, re.ASCII)
    try:
        return match and datetime.date(*map(int, match.groups()))
    except ValueError:
        return None


def _is_marketplace(provider: str, item: CatalogItem) -> bool:
    """Return whether third parties rent it out: RunPod's Community Cloud, whose places are countries."""
    return provider == "runpod" and len(item.location) == 2


def _best(items: list[CatalogItem]) -> dict[str, tuple[float, str]]:
    """Return, by chip, the price of one device and the words of the instance that has it."""
    best: dict[str, tuple[int, float, str]] = {}
    for item in items:
        chip, num_devices = _devices(item)
        if chip is None or item.spot or not math.isfinite(item.price) or item.price <= 0:
            continue
        price = item.price / num_devices
        words = f"{item.instance_name} in {item.location}, {num_devices} devices, ${item.price:g} per hour"
        offer = (
            -min(num_devices, chip.chips_per_host),
            price,
            words,
        )  # the fullest host first, then the cheapest
        best[chip.name] = min(best.get(chip.name, offer), offer)
    return {name: (price, words) for name, (_, price, words) in best.items()}


def _devices(item: CatalogItem) -> tuple[Chip | None, int]:
    """Return the chip of an instance and its number of JAX devices; None if the chip is not certain."""
    name, memory = item.gpu_name or "", item.gpu_memory
    if sliced := re.fullmatch(r"(?:tpu-)?(v\d\w*)-(\d+)", name, re.ASCII):  # one item is a whole slice
        chip = chip_named(sliced[1])
        if chip is None or chip.slices is None:
            return None, 1
        return chip, max(
            1, int(sliced[2]) * chip.slices.devices_per_chip // chip.slices.cores_per_chip_in_name
        )
    if item.gpu_count < 1 or memory is None:
        return None, 1
    if name in _MODULES:
        is_card = "pcie" in item.instance_name.lower()
        if not is_card and not _IS_MODULE.search(item.instance_name):
            return None, 1
        known = (_CARDS if is_card else _MODULES).get(name, {}).get(round(memory))
    else:
        known = _CHIPS.get(name)
    chip = CATALOG[known] if known else None
    if chip is None or chip.memory_bytes is None or abs(memory * GIB / chip.memory_bytes - 1) > _NEAR:
        return None, 1  # a part of a chip, or another variant
    return chip, item.gpu_count


def _table(name: str, date: datetime.date, source: str, best: Mapping[str, tuple[float, str]]) -> str:
    rows: list[str] = []
    for chip, (price, words) in sorted(best.items()):
        fields = f"chip = {_quoted(chip)}, usd_per_device_hour = {price:.6f}, listed = {_quoted(words)}"
        rows.append(f"    {{ {fields} }},")
    head = [
        f"[{name}]",
        f"provider = {_quoted(_PROVIDERS[name])}",
        f"date = {date}",
        f"source = {_quoted(source)}",
    ]
    return "\n".join([*head, "prices = [", *rows, "]", ""])


def _quoted(text: str) -> str:
    """Return a text as TOML and JSON both write it; a catalog's unusual characters become question marks."""
    return json.dumps(text.encode("ascii", "replace").decode())
