"""`meshwright fleets` and `meshwright formats`: what the catalogs hold."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import JsonFlag, print_json, row, show, table

if TYPE_CHECKING:
    from meshwright.formats import NumberFormat
    from meshwright.hardware import Chip

SCHEMA = 1
TINY = 1e-8  # a gradient of this size is zero in fp16 and below
LEGEND = """
Dense peaks of one JAX device; links one way, per device. What is blank is not known or not native.
weigh: compiler = its own compiler runs without the chip; simulate = only the CPU's, with --simulate"""
HOW_TO_WRITE = """
How to write a fleet
  64xH100           64 chips in their usual hosts of eight
  16x4xA100-80GB    16 hosts of four chips
  v5p-512, v6e-256  a TPU slice as Google names it
  8xCPU             eight simulated devices on this machine
  local             what is attached to this machine
meshwright fleets NAME shows one chip, every figure with its source"""


def fleets(
    name: Annotated[
        str | None, typer.Argument(help="Show every figure of this chip.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """The chips Meshwright knows and how to write a fleet of them, or one chip with its sources."""
    from meshwright.hardware import CATALOG, find_chip

    if name is not None:
        chip = find_chip(name)
        if as_json:
            print_json({"schema": SCHEMA, **_chip_dict(chip)})
        else:
            _show_chip(chip)
    elif as_json:
        print_json({"schema": SCHEMA, "chips": [_chip_dict(chip) for chip in CATALOG.values()]})
    else:
        _show_chips(tuple(CATALOG.values()))


def _weigh_by(chip: Chip) -> str:
    """What compiles for this chip without it: its own compiler, or only the CPU's in its place."""
    from meshwright.errors import InputError
    from meshwright.hardware import Fleet, topology_arguments

    if chip.platform == "cpu":
        return "compiler"
    try:
        topology_arguments(Fleet(chip=chip, num_hosts=1, chips_per_host=1, chips_per_domain=1))
    except InputError:
        return "simulate"
    return "compiler"


def _chip_dict(chip: Chip) -> dict[str, Any]:
    return {**dataclasses.asdict(chip), "weigh_by": _weigh_by(chip)}


def _show_chips(chips: tuple[Chip, ...]) -> None:
    from meshwright.units import format_bytes

    numbers = ("memory", "memory/s", "bf16\nTFLOP/s", "fp8\nTFLOP/s", "inside", "between")
    made = table("chip", *numbers, "weigh", "confidence", right=numbers)
    for chip in chips:
        row(
            made,
            chip.name,
            "" if chip.memory_bytes is None else format_bytes(chip.memory_bytes),
            _per_second(chip.memory_bytes_per_second),
            _teraflops(chip, "bf16"),
            _teraflops(chip, "fp8-e4m3"),
            _per_second(chip.inside.bytes_per_second if chip.inside else None),
            _per_second(chip.between.bytes_per_second if chip.between else None),
            _weigh_by(chip),
            chip.confidence,
        )
    show(made, LEGEND, HOW_TO_WRITE)


def _per_second(num_bytes: float | None) -> str:
    from meshwright.units import format_rate

    return "" if num_bytes is None else format_rate(num_bytes, "B/s")


def _teraflops(chip: Chip, format_name: str) -> str:
    peak = chip.peak_flops_per_second.get(format_name)
    return "" if peak is None else f"{peak / 1e12:,.0f}"


def _show_chip(chip: Chip) -> None:
    """Every figure, the doubtful ones marked, then the source of each group of them."""
    from rich.text import Text

    from meshwright.units import format_bytes, format_rate

    figures = table("figure", "value", "", right=("value",))

    def add(name: str, value: str, field: str) -> None:
        row(figures, name, value, "sources disagree, or it varies" if field in chip.uncertain_fields else "")

    for name, rate in chip.peak_flops_per_second.items():
        add(name, format_rate(rate, "FLOP/s"), name)
    if chip.memory_bytes is not None:
        add("memory", format_bytes(chip.memory_bytes), "memory_bytes")
    if chip.memory_bytes_per_second is not None:
        add("memory per second", _per_second(chip.memory_bytes_per_second), "memory_bytes_per_second")
    for name, link in (("inside", chip.inside), ("between", chip.between), ("host", chip.host)):
        if link is not None:
            add(f"link {name}", f"{link.name}, {_per_second(link.bytes_per_second)}", name)
    add("chips per host", str(chip.chips_per_host), "chips_per_host")
    add("chips per domain", str(chip.chips_per_domain), "chips_per_domain")
    if chip.num_sms is not None:
        add("multiprocessors", str(chip.num_sms), "num_sms")
    if chip.watts is not None:
        add("watts", f"{chip.watts:g}", "watts")
    sources = table("figures", "source")
    for group, source in chip.sources.items():
        row(sources, group, source)
    lines = [f"{chip.name}: {chip.vendor}, platform {chip.platform}, confidence {chip.confidence}"]
    lines += [f"also written: {', '.join(chip.aliases)}"] if chip.aliases else []
    lines += [f"device kinds: {', '.join(chip.device_kinds) or 'none seen'}"]
    lines += [f"slices: {', '.join(chip.slices.shapes)}"] if chip.slices is not None else []
    lines += [f"weigh: {_weigh_by(chip)}"]
    show(*(Text(line) for line in lines), "", figures, "", sources)


def formats(as_json: JsonFlag = False) -> None:
    """Number formats: bits, range, resolution, and what becomes of a gradient of 1e-8."""
    from meshwright.formats import FORMATS

    if as_json:
        print_json({"schema": SCHEMA, "formats": [_format_dict(each) for each in FORMATS.values()]})
        return
    numbers = ("bits", "exponent", "mantissa", "max", "normal from", "smallest", "epsilon")
    numbers = (*numbers, "1e-8 becomes")
    made = table("format", *numbers, right=numbers)
    for each in FORMATS.values():
        facts = _format_dict(each)
        tiny = facts["1e-8_becomes"]
        cells = [f"{facts[key]:.4g}" for key in ("max", "smallest_normal", "smallest_subnormal", "epsilon")]
        cells.append("" if tiny is None else f"{tiny:.3g}")
        bits = f"{each.bits_per_value:g}"
        row(made, each.name, bits, str(each.exponent_bits), str(each.mantissa_bits), *cells)
    note = "bits with a value's share of its block's scale; of block formats one element before its scale"
    show(made, note)


def _format_dict(each: NumberFormat) -> dict[str, Any]:
    alone = each.is_float and each.block_size == 1  # what a block keeps depends on its largest value
    return {
        "name": each.name,
        "bits": each.bits,
        "bits_per_value": each.bits_per_value,
        "exponent_bits": each.exponent_bits,
        "mantissa_bits": each.mantissa_bits,
        "max": each.max,
        "smallest_normal": each.smallest_normal,
        "smallest_subnormal": each.smallest_subnormal,
        "epsilon": each.epsilon,
        "block_size": each.block_size,
        "1e-8_becomes": each.round_trip(TINY) if alone else None,
    }
