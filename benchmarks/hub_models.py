"""The most downloaded models of the Hub: each is read here, or by transformers, or refused by name.

Run: python benchmarks/hub_models.py [ID ...] [--weigh] [--record] [--page]. hub_models.toml has the models,
and where their values were read. A model that is read here must have as many parameters as the module of
transformers on the meta device. --weigh also weighs each model that only transformers knows, and here one of
each family, on 64xH100 with short sequences. --record keeps the rows, and --page writes
docs/reference/hub-models.md from the newest record.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _record import RECORDS, ROOT, write_record

import meshwright as mw
from meshwright.config import huggingface_model, published_config, refusal_of
from meshwright.errors import MeshwrightError

MODELS = Path(__file__).with_name("hub_models.toml")
PAGE = ROOT / "docs" / "reference" / "hub-models.md"
BESIDE = ("preset", "sources", "unlisted")  # keys of a row that are not of its config.json
FLEET, LENGTH = "64xH100", 512
HERE, MODULE, REFUSED = "here", "module of transformers", "refused"
HEAD = """# Models of the Hub

`python benchmarks/hub_models.py --weigh --record --page` made this page. The models are those of
`benchmarks/hub_models.toml`, which are downloaded most for text generation; how they were chosen, and where
their values were read, stands there.

{counts}

*Here* is a configuration of Meshwright: weighed, planned and trained on its own step. *Module of
transformers* is [weighed as PyTorch runs it](../how-to/huggingface.md#other-models), by the same command.
Both have the parameters that `transformers` {transformers} counts.

| model | `model_type` | how | parameters | weighed |
|---|---|---|---|---|
"""


def config_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a row, from the published model whose values it has, if it names one."""
    keys = {key: value for key, value in row.items() if key not in BESIDE}
    base = published_config(row["preset"]) if "preset" in row else {}
    return {**base, **{key: None if value == "none" else value for key, value in keys.items()}}


def parameters_of_module(config: Mapping[str, Any], unread: Sequence[str]) -> int:
    """Return how many trained parameters the module of transformers has. It takes no memory."""
    import torch

    from meshwright.contrib.torch._transformers_module import causal_model

    with torch.device("meta"):
        made = causal_model(json.dumps(config), unread=",".join(unread), sequence_length=8)
    return sum(each.numel() for each in made["module"].parameters() if each.requires_grad)


def counted(name: str, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return how a model is read, and its parameters."""
    (folder / "config.json").write_text(json.dumps(config))
    row: dict[str, Any] = {"model": name, "model_type": config["model_type"]}
    found = huggingface_model(str(folder))
    assert found is not None, name
    refused = refusal_of(found[1], name)
    try:
        theirs = parameters_of_module(config, () if refused is None else refused.keys)
    except MeshwrightError as failed:
        theirs, why = None, f"{failed.message}"
    else:
        why = ""
    if refused is None:
        ours = mw.load(str(folder)).model.num_parameters
        assert theirs in (None, ours), f"{name}: {ours} parameters here, {theirs} of transformers"
        return row | {"how": HERE, "parameters": ours, "compared": theirs is not None}
    if theirs is None:
        return row | {"how": REFUSED, "why": why.removeprefix("config.json: ")}
    return row | {"how": MODULE, "parameters": theirs, "why": refused.message.removeprefix(f"{name}: ")}


def weighed(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the verdict of a model on the fleet."""
    overrides = {"batch.sequence_length": LENGTH}
    if row["how"] == HERE:
        overrides["batch.sequences"] = 64
    try:
        made = mw.weigh(str(folder), on=FLEET, overrides=overrides)
    except MeshwrightError as failed:
        return {"failed": failed.message}
    return {"fits": made.fits, "peak_gib": round((made.ledger.memory.peak_bytes or 0) / 2**30, 1)}


def rows_of(names: Sequence[str], weighs: bool) -> list[dict[str, Any]]:
    """Return a row for each model, or for those that are named."""
    models = tomllib.loads(MODELS.read_text())
    rows: list[dict[str, Any]] = []
    families: set[str] = set()
    for name in names or models:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / name.rpartition("/")[2]
            folder.mkdir()
            row = counted(name, config_of(models[name]), folder)
            if (
                weighs
                and row["how"] != REFUSED
                and (row["how"] == MODULE or row["model_type"] not in families)
            ):
                families.add(row["model_type"])
                row |= weighed(row, folder)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def page_of(record: Mapping[str, Any]) -> str:
    """Return the page of a record."""
    rows = record["model"]
    ways = {how: sum(row["how"] == how for row in rows) for how in (HERE, MODULE, REFUSED)}
    counts = (
        f"Of {len(rows)} models {ways[HERE]} are read here, {ways[MODULE]} are modules of `transformers`, "
    )
    counts += f"and {ways[REFUSED]} are refused with the name of what is missing."
    lines = [HEAD.format(counts=counts, transformers=record["versions"]["transformers"])]
    for row in rows:
        count = f"{row['parameters']:,}" if "parameters" in row else ""
        verdict = ""
        if "peak_gib" in row:
            verdict = f"{'fits' if row['fits'] else 'does not fit'}, {row['peak_gib']} GiB"
        how = f"refused: {row['why']}" if row["how"] == REFUSED else row["how"]
        lines.append(f"| `{row['model']}` | `{row['model_type']}` | {how} | {count} | {verdict} |\n")
    lines.append(
        f"\n*Weighed*: one device of `{FLEET}` in the default layout, with one sequence of {LENGTH} tokens; "
        "of models that are read here the first of each family.\n"
    )
    return "".join(lines)


def main() -> None:
    """Print the rows, and keep what is asked for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", metavar="ID")
    for name in ("weigh", "record", "page"):
        options.add_argument(f"--{name}", action="store_true")
    given = options.parse_args()
    rows = rows_of(given.names, given.weigh) if not given.page or given.record or given.names else []
    if given.record:
        command = "python benchmarks/hub_models.py" + " --weigh" * given.weigh + " --record"
        write_record("hub_models", command, ("torch", "transformers"), {"fleet": FLEET}, {"model": rows})
    if given.page:
        newest = max(RECORDS.glob("*_hub_models.toml"))
        PAGE.write_text(page_of(tomllib.loads(newest.read_text())))


if __name__ == "__main__":
    main()
