"""Define the commands `fleets`, `formats`, `presets` and `init`.

`fleets` and `formats` show the catalogs. `presets` and `init` provide configurations to start from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import JsonFlag, answer, print_json, say, table
from meshwright.errors import InputError, nearest_name
from meshwright.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from meshwright.config import RunConfig
    from meshwright.formats import NumberFormat
    from meshwright.hardware import Chip, Link

SCHEMA = 1
TINY = 1e-8  # a gradient of this size is zero in fp16 and in smaller formats
LEGEND = """
Dense peaks of one JAX device; links one way, per device. A blank cell is unknown or not native.
weigh: compiler = its own compiler runs without the chip; compiler* = the same, for a target made of published
figures; simulate = only the CPU's compiler, with --simulate: fleets NAME gives the reason"""
HOW_TO_WRITE = """
How to write a fleet
  64xH100           64 chips in their usual hosts of eight
  16x4xA100-80GB    16 hosts of four chips
  v5p-512, v6e-256  a TPU slice as Google names it
  4xv5e-256         four such slices, joined by the data centre's network
  8xCPU             eight simulated devices on this machine
  local             the devices attached to this machine
meshwright fleets NAME shows one chip, every figure with its source"""


def fleets(
    name: Annotated[
        str | None, typer.Argument(help="Show every figure of this chip.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the chips and how to write a fleet of them, or show one chip with its sources."""
    from meshwright.hardware import CATALOG, find_chip

    if name is not None:
        chip = find_chip(name)
        answer(as_json, {"schema": SCHEMA, **_chip_fields(chip)}, lambda: _chip_page(chip))
    else:
        chips = [_chip_fields(chip) for chip in CATALOG.values()]
        answer(as_json, {"schema": SCHEMA, "chips": chips}, _chips_page)


def _chip_fields(chip: Chip) -> dict[str, Any]:
    """Return the record and how to weigh: by its "compiler", which needs no chip, or "simulate"."""
    from meshwright.hardware import why_simulated

    why = why_simulated(chip)
    weigh_by = "simulate" if why else "compiler"
    return {**dataclasses.asdict(chip), "weigh_by": weigh_by, "why_simulated": why}


def _chips_page() -> tuple[Any, ...]:
    from meshwright.hardware import CATALOG, why_simulated

    rows: list[list[str]] = []
    for chip in CATALOG.values():
        peaks = (chip.peak_flops_per_second.get(name) for name in ("bf16", "fp8-e4m3"))
        links = (link and link.bytes_per_second for link in (chip.inside, chip.between))
        compiler = "compiler*" if chip.target is not None and chip.target.rendered else "compiler"
        rows.append(
            [
                chip.name,
                "" if chip.memory_bytes is None else format_bytes(chip.memory_bytes),
                _per_second(chip.memory_bytes_per_second),
                *("" if peak is None else f"{peak / 1e12:,.0f}" for peak in peaks),
                *map(_per_second, links),
                "simulate" if why_simulated(chip) else compiler,
                chip.confidence,
            ]
        )
    numbers = ("memory", "memory/s", "bf16\nTFLOP/s", "fp8\nTFLOP/s", "inside", "between")
    return table(("chip", *numbers, "weigh", "confidence"), rows, right=numbers), LEGEND, HOW_TO_WRITE


def _per_second(num_bytes: float | None) -> str:
    return "" if num_bytes is None else format_rate(num_bytes, "B/s")


def _link(link: Link) -> str:
    groups = [
        f"{_per_second(rate)} in groups of {members} of {domain}"
        for domain, rates in link.by_group.items()
        for members, rate in rates.items()
    ]
    return "; ".join([f"{link.name}, {_per_second(link.bytes_per_second)}", *groups])


def _chip_page(chip: Chip) -> tuple[Any, ...]:
    """Return every figure, with a mark on the doubtful ones, then the source of each group of figures."""
    from rich.text import Text

    doubt = "sources disagree, or it varies"
    rows = [
        (name, value, doubt if field in chip.uncertain_fields else "")
        for name, value, field in _figures(chip)
    ]
    lines = [f"{chip.name}: {chip.vendor}, platform {chip.platform}, confidence {chip.confidence}"]
    lines += [f"also written: {', '.join(chip.aliases)}"] if chip.aliases else []
    lines += [f"device kinds: {', '.join(chip.device_kinds) or 'none seen'}"]
    lines += [f"slices: {', '.join(chip.slices.shapes)}{_several(chip)}"] if chip.slices is not None else []
    lines += [f"weigh: {_how_it_is_weighed(chip)}"]
    figures = table(("figure", "value", ""), rows, right=("value",))
    return *map(Text, lines), "", figures, "", table(("figures", "source"), chip.sources.items())


def _several(chip: Chip) -> str:
    """Return how several slices of a chip are written; "" if no link joins them."""
    if chip.slices is None or chip.between is None:
        return ""
    number = chip.slices.number_in_name(chip.slices.shapes[-1])
    return f"; several of one shape: 4x{chip.name}-{number}"


def _how_it_is_weighed(chip: Chip) -> str:
    from meshwright.hardware import why_simulated

    if why := why_simulated(chip):
        return f"simulate ({why})"
    if chip.target is None:
        return "compiler"
    origin = "a target made of published figures" if chip.target.rendered else "a target of XLA"
    return f"compiler (for {origin})"


# The name of a figure, the field of `Chip` or of its `Target`, and the function that puts it in words.
CHIP_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("memory", "memory_bytes", format_bytes),
    ("memory per second", "memory_bytes_per_second", _per_second),
    ("link inside", "inside", _link),
    ("link between", "between", _link),
    ("link host", "host", _link),
    ("chips per host", "chips_per_host", str),
    ("chips per domain", "chips_per_domain", str),
    ("multiprocessors", "num_sms", str),
    ("watts", "watts", "{:g}".format),
)
TARGET_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("compute capability", "compute_capability", lambda numbers: ".".join(map(str, numbers))),
    ("multiprocessors", "core_count", str),
    ("FP32 units each", "fpus_per_core", str),
    ("clock", "clock_ghz", lambda ghz: format_rate(ghz * 1e9, "Hz")),
    ("memory per second", "memory_bytes_per_second", _per_second),
    ("L2 cache", "l2_bytes", format_bytes),
    ("shared memory each", "shared_memory_per_core_bytes", format_bytes),
    ("shared memory of a block", "shared_memory_per_block_optin_bytes", format_bytes),
    ("threads each", "threads_per_core_limit", str),
    ("NVLink links", "nvlink_active_links", str),
)


def _figures(chip: Chip) -> Iterator[tuple[str, str, str]]:
    """Yield each known figure of a chip in words, and its field's name as in `uncertain_fields`."""
    for name, peak in chip.peak_flops_per_second.items():
        yield name, format_rate(peak, "FLOP/s"), name
    for name, field, words in CHIP_FIGURES:
        if (value := getattr(chip, field)) is not None:
            yield name, words(value), field
    for name, field, words in TARGET_FIGURES if chip.target is not None else ():
        yield f"target: {name}", words(getattr(chip.target, field)), "target"


def formats(as_json: JsonFlag = False) -> None:
    """List the number formats: bits, range, resolution, and how each stores a gradient of 1e-8."""
    from meshwright.formats import FORMATS

    listed = [_format_fields(number_format) for number_format in FORMATS.values()]
    answer(as_json, {"schema": SCHEMA, "formats": listed}, lambda: _formats_page(listed))


def _formats_page(formats: list[dict[str, Any]]) -> tuple[Any, ...]:
    numbers = ("bits", "exponent", "mantissa", "max", "normal from", "smallest", "epsilon", "1e-8 becomes")
    rows: list[list[str]] = []
    for fields in formats:
        bits = (f"{fields['bits_per_value']:g}", str(fields["exponent_bits"]), str(fields["mantissa_bits"]))
        limits = (fields[key] for key in ("max", "smallest_normal", "smallest_subnormal", "epsilon"))
        tiny = fields["1e-8_becomes"]
        cells = (f"{limit:.4g}" for limit in limits)
        rows.append([fields["name"], *bits, *cells, "" if tiny is None else f"{tiny:.3g}"])
    note = "bits with a value's share of its block's scale; of block formats one element before its scale"
    return table(("format", *numbers), rows, right=numbers), note


def _format_fields(number_format: NumberFormat) -> dict[str, Any]:
    names = (
        "name bits bits_per_value exponent_bits mantissa_bits max smallest_normal smallest_subnormal epsilon"
    )
    fields = {name: getattr(number_format, name) for name in (*names.split(), "block_size")}
    alone = number_format.is_float and number_format.block_size == 1  # else the largest of its block matters
    return {**fields, "1e-8_becomes": number_format.round_trip(TINY) if alone else None}


PRESETS_SCHEMA = 1


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Show everything this preset sets.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the configurations and published models that come with Meshwright, or print one as TOML."""
    from meshwright.config import load_config, model_room, preset_about, preset_names
    from meshwright.contrib.key_docs import commented_toml

    if name is None:
        listed = [_preset_fields(load_config(preset)) for preset in preset_names()]
        models = [{**_preset_fields(load_config(each)), "id": each} for each in model_room().published_ids()]
        facts = {"schema": PRESETS_SCHEMA, "presets": listed, "models": models}
        answer(as_json, facts, lambda: (*_presets_page(listed), _models_page(models)))
        return
    config = load_config(name)
    if as_json:
        print_json({"schema": PRESETS_SCHEMA, **config.model_dump(mode="json")})
    else:
        about = ": ".join(filter(None, (name, preset_about(name))))
        say(commented_toml(config, about=about).rstrip("\n"))


def _preset_fields(config: RunConfig) -> dict[str, Any]:
    return {
        "name": config.name,
        "model": config.model.kind,
        "num_parameters": config.model.num_parameters,
        "num_layers": getattr(config.model, "num_layers", None),
        "sequence_length": config.batch.sequence_length,
        "tokens_per_step": config.batch.tokens_per_step,
        "steps": config.steps,
        "precision": config.precision,
        "layout": config.layout,
    }


def _presets_page(presets: list[dict[str, Any]]) -> tuple[Any, ...]:
    numbers = ("parameters", "layers", "sequence", "batch tokens")
    rows = [
        (
            fields["name"],
            fields["model"],
            format_count(fields["num_parameters"]),
            str(fields["num_layers"] or ""),
            f"{fields['sequence_length']:,}",
            format_count(fields["tokens_per_step"]),
            fields["precision"],
            fields["layout"],
        )
        for fields in presets
    ]
    note = '\nmeshwright presets NAME shows one in full; a TOML file may start from one: preset = "NAME"\n'
    return table(("preset", "model", *numbers, "precision", "layout"), rows, right=numbers), note


def _models_page(models: list[dict[str, Any]]) -> Any:
    """Return the published models by their ids; an id's last part suffices, in any case."""
    rows = [(each["id"], format_count(each["num_parameters"]), str(each["num_layers"])) for each in models]
    return table(("published model", "parameters", "layers"), rows, right=("parameters", "layers"))


def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write; it ends in .toml.")] = Path(
        "run.toml"
    ),
    preset: Annotated[
        str, typer.Option("--from", metavar="PRESET", help="The configuration to begin with.")
    ] = "bytes-nano",
    as_json: JsonFlag = False,
) -> None:
    """Write a configuration with the meaning of every key; it can be weighed and trained unchanged."""
    from meshwright.config import load_config, preset_about, preset_names
    from meshwright.contrib.key_docs import commented_toml

    if preset not in preset_names():
        raise InputError(f"no preset is named {preset!r}", hint=nearest_name(preset, preset_names()))
    if path.suffix != ".toml":
        better = path / "run.toml" if path.is_dir() else path.with_suffix(".toml")
        raise InputError(f"{path} does not end in .toml", hint=f"name it {better}")
    commands = f"  meshwright weigh {path} --on 8xH100\n  meshwright train {path}"
    about = (
        f"A run to change, made from the preset {preset}. Keys that have a default may be left out:\n"
        "docs/reference/configuration.md lists the defaults and explains each key.\n"
        f"{commands}\n\n{preset_about(preset)}"
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(commented_toml(load_config(preset), about=about))
    except FileExistsError:
        raise InputError(f"{path} exists already", hint="name another file, or delete that one") from None
    except OSError as refused:
        hint = "name a file in a folder that exists and can be written"
        raise InputError(f"cannot write {path}: {refused.strerror}", hint=hint) from refused
    if as_json:
        print_json({"schema": PRESETS_SCHEMA, "file": str(path), "preset": preset})
    else:
        say(f"{path}, from {preset}. Next:\n{commands}")
