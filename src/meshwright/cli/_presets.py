"""`meshwright presets`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import JsonFlag, print_json, row, show, table

if TYPE_CHECKING:
    from meshwright.config import RunConfig

SCHEMA = 1


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Show everything this preset sets.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """The configurations that come with Meshwright, or one of them in full."""
    from meshwright.config import load_config, preset_names

    if name is not None:
        tree = load_config(name).model_dump(mode="json")
        if as_json:
            print_json({"schema": SCHEMA, **tree})
        else:
            print(_toml(tree))
        return
    found = [_facts(load_config(each)) for each in preset_names()]
    if as_json:
        print_json({"schema": SCHEMA, "presets": found})
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


def _toml(tree: dict[str, Any]) -> str:
    """A resolved config as a file that `load_config` reads: plain keys first, then sections."""
    plain = [f"{key} = {_value(v)}" for key, v in tree.items() if not isinstance(v, dict) and key != "name"]
    lines = [f"# {tree['name']}", *plain]
    for section, values in tree.items():
        if isinstance(values, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines)


def _value(value: object) -> str:
    """A TOML value; None is the word that `load_config` reads as none."""
    import json

    return '"none"' if value is None else json.dumps(value)
