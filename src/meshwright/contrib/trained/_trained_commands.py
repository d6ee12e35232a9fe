"""Define `meshwright sample` and `meshwright export`, which read a run's checkpoint."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import JsonFlag, answer, phases, print_json, say
from meshwright.errors import InputError, nearest_name

if TYPE_CHECKING:
    from meshwright.trainer.checkpoint import Rejected

SAMPLE_SCHEMA = 1
MOST_TOKENS = 10**6  # each token runs the model once; a million take hours
LARGEST_SEED = 2**32 - 1
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder that `train` wrote.", show_default=False)
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", min=0, help="Step of the checkpoint.", show_default="the newest whole one"),
]


def sample(
    run: RunFolder,
    prompt: Annotated[
        str, typer.Option("--prompt", help="The text to continue.", show_default="a new line")
    ] = "\n",
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=MOST_TOKENS, help="How many tokens to write.")
    ] = 160,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0, help="Below 1 prefers likely tokens; 0 takes the likeliest."),
    ] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of the draw.")] = 0,
    step: StepOption = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="bytes, or a tokenizer.json.",
            show_default="bytes, if the run's tokens are bytes",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print text that the model of a run's checkpoint writes, on one device."""
    from ._sample_run import sample_run  # imports jax

    with phases(f"sampling from {run}") as on_phase:
        written = sample_run(
            run,
            prompt=prompt,
            num_tokens=tokens,
            temperature=temperature,
            seed=seed,
            step=step,
            tokenizer=tokenizer,
            on_phase=on_phase,
        )
    rejected = _warned(written.rejected)
    if as_json:
        fields = {name: value for name, value in dataclasses.asdict(written).items() if name != "rejected"}
        print_json({"schema": SAMPLE_SCHEMA, **fields, "rejected": rejected})
    else:
        say(written.prompt + written.text)


EXPORT_SCHEMA = 1


def export(
    run: RunFolder,
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="The safetensors file to make.", show_default=False)
    ],
    step: StepOption = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="meshwright; or huggingface, or peft for adapters alone: then --to is a folder.",
        ),
    ] = "meshwright",
    as_json: JsonFlag = False,
) -> None:
    """Write the parameters of a run's checkpoint as safetensors, each array under its path.

    With --format huggingface, as the folder of a model that `transformers` loads, adapters merged; with peft,
    the adapters alone as PEFT loads them.
    """
    from meshwright.registry import registered
    from meshwright.trainer.checkpoint import checkpoint_of, export_parameters
    from meshwright.units import format_count

    others = registered("meshwright.exports")
    formats = ("meshwright", *others)
    if form not in formats:
        raise InputError(f"--format {form!r} is not known", hint=nearest_name(form, formats))

    with phases(f"exporting {run}") as on_phase:
        on_phase("verifying the checkpoint")
        checkpoint = checkpoint_of(run, step)
        on_phase("writing")
        own = form == "meshwright"
        arrays = export_parameters(checkpoint, to) if own else others[form](checkpoint, run, to)
    listed = {name: {"shape": list(array.shape), "dtype": array.dtype} for name, array in arrays.items()}
    fields = {"schema": EXPORT_SCHEMA, "file": str(to), "step": checkpoint.step, "arrays": listed}
    num_parameters = format_count(sum(math.prod(array.shape) for array in arrays.values()))
    words = f"{num_parameters} parameters in {len(arrays)} arrays, step {checkpoint.step}"
    answer(as_json, {**fields, "rejected": _warned(checkpoint.rejected)}, lambda: f"{to}: {words}")


def _warned(rejected: Sequence[Rejected]) -> list[dict[str, Any]]:
    """Warn of each damaged checkpoint that was skipped, and return them for the JSON answer."""
    for checkpoint in rejected:
        sys.stderr.write(f"warning: the checkpoint of step {checkpoint.step} is damaged: {checkpoint.why}\n")
    return [{"step": checkpoint.step, "why": checkpoint.why} for checkpoint in rejected]
