"""Define the commands `fleets`, `formats`, `presets` and `init`.

`fleets` and `formats` show the catalogs. `presets` and `init` provide configurations to start from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import JsonFlag, print_json, row, show, table

if TYPE_CHECKING:
    from meshwright.config import RunConfig
    from meshwright.formats import NumberFormat
    from meshwright.hardware import Chip, Target

SCHEMA = 1
TINY = 1e-8  # a gradient of this size is zero in fp16 and in smaller formats
LEGEND = """
Dense peaks of one JAX device; links one way, per device. What is blank is not known or not native.
weigh: compiler = its own compiler runs without the chip; compiler* = the same, for a target made of published
figures; simulate = only the CPU's, with --simulate: fleets NAME says why"""
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
    """Return "compiler" if the chip's own compiler runs without the chip, else "simulate"."""
    from meshwright.hardware import why_simulated

    return "simulate" if why_simulated(chip) else "compiler"


def _chip_dict(chip: Chip) -> dict[str, Any]:
    from meshwright.hardware import why_simulated

    return {**dataclasses.asdict(chip), "weigh_by": _weigh_by(chip), "why_simulated": why_simulated(chip)}


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
            _weigh_by(chip) + ("*" if _weigh_by(chip) == "compiler" and _is_rendered(chip) else ""),
            chip.confidence,
        )
    show(made, LEGEND, HOW_TO_WRITE)


def _is_rendered(chip: Chip) -> bool:
    return chip.target is not None and chip.target.rendered


def _per_second(num_bytes: float | None) -> str:
    from meshwright.units import format_rate

    return "" if num_bytes is None else format_rate(num_bytes, "B/s")


def _teraflops(chip: Chip, format_name: str) -> str:
    peak = chip.peak_flops_per_second.get(format_name)
    return "" if peak is None else f"{peak / 1e12:,.0f}"


def _show_chip(chip: Chip) -> None:
    """Show every figure, with a mark on the doubtful ones, then the source of each group of figures."""
    from rich.text import Text

    figures = table("figure", "value", "", right=("value",))
    for name, value, field in _figures(chip):
        row(figures, name, value, "sources disagree, or it varies" if field in chip.uncertain_fields else "")
    sources = table("figures", "source")
    for group, source in chip.sources.items():
        row(sources, group, source)
    lines = [f"{chip.name}: {chip.vendor}, platform {chip.platform}, confidence {chip.confidence}"]
    lines += [f"also written: {', '.join(chip.aliases)}"] if chip.aliases else []
    lines += [f"device kinds: {', '.join(chip.device_kinds) or 'none seen'}"]
    lines += [f"slices: {', '.join(chip.slices.shapes)}"] if chip.slices is not None else []
    lines += [f"weigh: {_weigh_by(chip)}{_how(chip)}"]
    show(*(Text(line) for line in lines), "", figures, "", sources)


def _figures(chip: Chip) -> list[tuple[str, str, str]]:
    """Return each known figure of a chip in words, and its field's name as in `uncertain_fields`."""
    from meshwright.units import format_bytes, format_rate

    found = [(name, format_rate(rate, "FLOP/s"), name) for name, rate in chip.peak_flops_per_second.items()]
    if chip.memory_bytes is not None:
        found += [("memory", format_bytes(chip.memory_bytes), "memory_bytes")]
    if chip.memory_bytes_per_second is not None:
        rate = _per_second(chip.memory_bytes_per_second)
        found += [("memory per second", rate, "memory_bytes_per_second")]
    for name, link in (("inside", chip.inside), ("between", chip.between), ("host", chip.host)):
        if link is not None:
            found += [(f"link {name}", f"{link.name}, {_per_second(link.bytes_per_second)}", name)]
    found += [
        ("chips per host", str(chip.chips_per_host), "chips_per_host"),
        ("chips per domain", str(chip.chips_per_domain), "chips_per_domain"),
    ]
    if chip.num_sms is not None:
        found += [("multiprocessors", str(chip.num_sms), "num_sms")]
    if chip.watts is not None:
        found += [("watts", f"{chip.watts:g}", "watts")]
    if chip.target is not None:
        found += [(f"target: {name}", value, "target") for name, value in _target_figures(chip.target)]
    return found


def _how(chip: Chip) -> str:
    """Return the words after "compiler" or "simulate": the origin of the target, or why it has none."""
    from meshwright.hardware import why_simulated

    if why := why_simulated(chip):
        return f" ({why})"
    if chip.target is None:
        return ""
    return f" (for {'a target made of published figures' if chip.target.rendered else 'a target of XLA'})"


def _target_figures(target: Target) -> list[tuple[str, str]]:
    """Return in words the figures that the GPU compiler receives in addition to the chip's memory."""
    from meshwright.units import format_bytes, format_rate

    return [
        ("compute capability", ".".join(map(str, target.compute_capability))),
        ("multiprocessors", str(target.core_count)),
        ("FP32 units each", str(target.fpus_per_core)),
        ("clock", format_rate(target.clock_ghz * 1e9, "Hz").removesuffix("/s")),
        ("memory per second", format_rate(target.memory_bytes_per_second, "B/s")),
        ("L2 cache", format_bytes(target.l2_bytes)),
        ("shared memory each", format_bytes(target.shared_memory_per_core_bytes)),
        ("shared memory of a block", format_bytes(target.shared_memory_per_block_optin_bytes)),
        ("threads each", str(target.threads_per_core_limit)),
        ("NVLink links", str(target.nvlink_active_links)),
    ]


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
    alone = each.is_float and each.block_size == 1  # a block's result depends on its largest value
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


PRESETS_SCHEMA = 1


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Show everything this preset sets.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the configurations that come with Meshwright, or print one as commented TOML."""
    from meshwright.config import commented_toml, load_config, preset_about, preset_names

    if name is not None:
        config = load_config(name)
        if as_json:
            print_json({"schema": PRESETS_SCHEMA, **config.model_dump(mode="json")})
        else:
            print(commented_toml(config, about=f"{name}: {preset_about(name)}"), end="")
        return
    found = [_facts(load_config(each)) for each in preset_names()]
    if as_json:
        print_json({"schema": PRESETS_SCHEMA, "presets": found})
        return
    from meshwright.units import format_count

    numbers = ("parameters", "layers", "sequence", "batch tokens")
    made = table("preset", "model", *numbers, "precision", "layout", right=numbers)
    for facts in found:
        row(
            made,
            facts["name"],
            facts["model"],
            format_count(facts["num_parameters"]),
            str(facts["num_layers"] or ""),
            f"{facts['sequence_length']:,}",
            format_count(facts["tokens_per_step"]),
            facts["precision"],
            facts["layout"],
        )
    show(made, '\nmeshwright presets NAME shows one in full; a TOML file may start from one: preset = "NAME"')


def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write; it ends in .toml.")] = Path(
        "run.toml"
    ),
    preset: Annotated[
        str, typer.Option("--from", metavar="PRESET", help="The configuration to begin with.")
    ] = "bytes-nano",
    as_json: JsonFlag = False,
) -> None:
    """Write a configuration with the meaning of every key, which weighs and trains as it stands."""
    from meshwright.config import commented_toml, load_config, preset_about, preset_names
    from meshwright.errors import InputError, nearest_name

    if preset not in preset_names():
        raise InputError(f"no preset is named {preset!r}", hint=nearest_name(preset, preset_names()))
    if path.suffix != ".toml":
        raise InputError(f"{path} does not end in .toml", hint=f"name it {path.with_suffix('.toml')}")
    about = (
        f"A run to change, begun from the preset {preset}. Keys that have a default may be left out:\n"
        "docs/configuration.md gives it, and says more of each key.\n"
        f"  meshwright weigh {path} --on 8xH100\n"
        f"  meshwright train {path}\n\n"
        f"{preset_about(preset)}"
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(commented_toml(load_config(preset), about=about))
    except FileExistsError:
        raise InputError(f"{path} is there already", hint="name another file, or delete that one") from None
    except OSError as refused:
        hint = "name a file in a folder that exists and can be written"
        raise InputError(f"cannot write {path}: {refused.strerror}", hint=hint) from refused
    if as_json:
        print_json({"schema": PRESETS_SCHEMA, "file": str(path), "preset": preset})
    else:
        print(
            f"{path}, from {preset}. Next:\n  meshwright weigh {path} --on 8xH100\n  meshwright train {path}"
        )


def _facts(config: RunConfig) -> dict[str, Any]:
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
