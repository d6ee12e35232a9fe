"""`meshwright presets` and `meshwright init`: configurations to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import JsonFlag, print_json, row, show, table

if TYPE_CHECKING:
    from meshwright.config import RunConfig

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
