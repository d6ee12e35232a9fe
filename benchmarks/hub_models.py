"""The most downloaded models of the Hub: each is read here, or by transformers, or refused by name.

Run: python benchmarks/hub_models.py [ID ...] [--weigh] [--record] [--page] [--kept FOLDER] [--processes N]
[--limit SECONDS]. hub_models.toml has the models, and where their values were read. A model that is read here
must have as many parameters as the module of transformers on the meta device. --weigh weighs each model that
is not refused, the small ones first, by the command and in a process of its own with --limit seconds. --kept
is a folder (build/hub_models): a row that it has is not made again unless it failed, so that a run that was
ended goes on; remove it to begin anew. --record keeps the rows, and --page writes
docs/reference/hub-models.md from the newest record and that of families_weighed.py.

A model is weighed on as few of 1, 8, 64 and 512 H100 as hold 16 bytes of each parameter in 45 GiB, in
sequences of at most 4,096 tokens: four for each device where it is read here, as microbatches; one where
PyTorch runs it, with its blocks run again in the backward pass above 3 billion parameters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from _record import RECORDS, ROOT, commit, write_record
from _weighed_alone import weighed_alone
from families_weighed import section_of

import meshwright as mw
from meshwright.contrib.hub import huggingface_model, published_config, refusal_of
from meshwright.errors import MeshwrightError

MODELS = Path(__file__).with_name("hub_models.toml")
PAGE = ROOT / "docs" / "reference" / "hub-models.md"
BESIDE = ("preset", "sources", "unlisted")  # keys of a row that are not of its config.json
FLEETS, STATE_BYTES, ROOM = (1, 8, 64, 512), 16, 45 * 2**30
LENGTH, SEQUENCES = 4096, 4
LIMITS = ("max_position_embeddings", "n_positions")
KEEPS_ALL = 3e9  # parameters up to which a module's blocks do not run again
HERE, MODULE, REFUSED = "here", "module of transformers", "refused"
HEAD = """# Models of the Hub

`python benchmarks/hub_models.py --weigh --record --page` made this page. The models are those of
`benchmarks/hub_models.toml`, which are downloaded most for text generation; how they were chosen, and where
their values were read, stands there.

{counts}

*Here* is a configuration of Meshwright: weighed, planned and trained on its own step. *Module of
transformers* is [weighed as PyTorch runs it](../how-to/huggingface.md#other-models), by the same command.
Both have the parameters that `transformers` {transformers} counts.

*GiB* is what a device of the fleet needs, of 79.1 GiB; **bold** where it does not fit. *Step* is the
predicted time and its interval. *Executed* is executed FLOPs for each of the model's. *Other* is the share of
memory without a category. *Processor* are the seconds that the command took of one core; few where another
model of the same sizes was weighed before.

| model | `model_type` | how | parameters | fleet | GiB | step, s | executed | other, % | processor, s |
|---|---|---|---|---|---|---|---|---|---|
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


def settings_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the fleet for a model, and the settings with which it is weighed."""
    size = row["parameters"]
    devices = next((n for n in FLEETS if size * STATE_BYTES <= n * ROOM), FLEETS[-1])
    limits = [config[key] for key in LIMITS if config.get(key)]
    settings: dict[str, Any] = {"batch.sequence_length": min((LENGTH, *limits))}
    if row["how"] == HERE:
        settings["batch.sequences"] = SEQUENCES * devices
    elif size > KEEPS_ALL:
        settings["remat"] = "full"
    return f"{devices}xH100", settings


def made_of(name: str, row: Mapping[str, Any], config: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Return a row with what its weighing found."""
    fleet, settings = settings_of(row, config)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / name.rpartition("/")[2]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        kept = {key: value for key, value in row.items() if key != "failed"}
        return {**kept, "fleet": fleet, **weighed_alone(str(folder), fleet, settings, limit)}


def rows_of(
    names: Sequence[str], weighs: bool, kept: Path, processes: int, limit: float
) -> list[dict[str, Any]]:
    """Return a row for each model, or for those that are named, and keep each in a file when it is made."""
    models = tomllib.loads(MODELS.read_text())
    names = names or list(models)
    kept.mkdir(parents=True, exist_ok=True)
    files = {name: kept / f"{name.replace('/', '--')}.json" for name in names}
    rows = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}

    def keep(name: str, row: Mapping[str, Any]) -> None:
        rows[name] = {**row, "commit": commit()}
        files[name].write_text(json.dumps(rows[name]))
        print(json.dumps(row), flush=True)

    for name in names:
        if name not in rows:
            with tempfile.TemporaryDirectory() as folder:
                keep(name, counted(name, config_of(models[name]), Path(folder)))
    is_done = {name: row["how"] == REFUSED or "fits" in row or "refused" in row for name, row in rows.items()}
    left = [name for name in names if weighs and not is_done[name]]
    with ThreadPoolExecutor(processes) as pool:
        jobs = {
            pool.submit(made_of, name, rows[name], config_of(models[name]), limit): name
            for name in sorted(left, key=lambda name: rows[name]["parameters"])
        }
        for job in as_completed(jobs):
            keep(jobs[job], job.result())
    return [rows[name] for name in names]


def page_of(record: Mapping[str, Any], families: Mapping[str, Any]) -> str:
    """Return the page of a record, and of that of `families_weighed.py`."""
    rows = record["model"]
    ways = {how: sum(row["how"] == how for row in rows) for how in (HERE, MODULE, REFUSED)}
    counts = (
        f"Of {len(rows)} models {ways[HERE]} are read here, {ways[MODULE]} are modules of `transformers`, "
    )
    counts += f"and {ways[REFUSED]} are refused with the name of what is missing. "
    counts += f"{sum('fits' in row for row in rows)} are weighed at their published sizes."
    lines = [HEAD.format(counts=counts, transformers=record["versions"]["transformers"])]
    for row in rows:
        how = f"refused: {row['why']}" if row["how"] == REFUSED else row["how"]
        size = f"{row['parameters']:,}" if "parameters" in row else ""
        cells = [f"`{row['model']}`", f"`{row['model_type']}`", how, size, *figures_of(row)]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join((*lines, section_of(families)))


def figures_of(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a weighing."""
    if "fits" not in row:
        return [row.get("fleet", ""), row.get("refused", row.get("failed", "")), *[""] * 4]
    memory = f"{row['needed_gib']:.1f}" if row["fits"] else f"**{row['needed_gib']:.1f}**"
    if "model_flops" not in row:
        return [row["fleet"], memory, "the compiler refuses it", "", "", f"{row['processor_seconds']:.0f}"]
    step = "" if "step_seconds" not in row else step_of(row["step_seconds"])
    others = (
        f"{row['executed_per_model']:.2f}",
        f"{row['other_percent']:.1f}",
        f"{row['processor_seconds']:.0f}",
    )
    return [row["fleet"], memory, step, *others]


def step_of(seconds: Sequence[float]) -> str:
    """Return the words of a predicted time: with its interval, or one without an upper end, or alone."""
    forms = {1: "{0:.3g}", 2: "{1:.3g} ({0:.3g} or more)", 3: "{1:.3g} ({0:.3g} to {2:.3g})"}
    return forms[len(seconds)].format(*seconds)


def main() -> None:
    """Print the rows, and keep what is asked for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", metavar="ID")
    for name in ("weigh", "record", "page"):
        options.add_argument(f"--{name}", action="store_true")
    options.add_argument("--kept", type=Path, default=ROOT / "build" / "hub_models")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--limit", type=float, default=600)
    given = options.parse_args()
    if given.weigh or given.record or given.names or not given.page:
        rows = rows_of(given.names, given.weigh, given.kept, given.processes, given.limit)
        if given.record:
            write(rows, given.weigh)
    if given.page:
        PAGE.write_text(page_of(newest("hub_models"), newest("families_weighed")))


def newest(name: str) -> dict[str, Any]:
    """Return the newest record of a benchmark."""
    return tomllib.loads(max(RECORDS.glob(f"*_{name}.toml")).read_text())


def write(rows: Sequence[dict[str, Any]], weighs: bool) -> None:
    """Write the record of the rows, with the commits at which they were made."""
    command = "python benchmarks/hub_models.py" + " --weigh" * weighs + " --record"
    facts = {"rows_of_commits": sorted({row["commit"] for row in rows})}
    plain = [{key: value for key, value in row.items() if key != "commit"} for row in rows]
    write_record("hub_models", command, ("torch", "transformers"), facts, {"model": plain})


if __name__ == "__main__":
    main()
