"""`meshwright sample`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from ._console import JsonFlag, phases, print_json

SAMPLE_SCHEMA = 1
MOST_TOKENS = 10**6  # each runs the model once; a million take hours
LARGEST_SEED = 2**32 - 1
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder that `train` wrote.", show_default=False)
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", min=0, help="Of this step's checkpoint.", show_default="the newest whole one"),
]


def sample(
    run: RunFolder,
    prompt: Annotated[
        str, typer.Option("--prompt", help="Text to go on from.", show_default="a new line")
    ] = "\n",
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=MOST_TOKENS, help="How many tokens to write.")
    ] = 160,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="Below 1 likelier tokens are preferred; 0: always.")
    ] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Of the draw.")] = 0,
    step: StepOption = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="bytes, or a tokenizer.json.",
            show_default="bytes, where the run's tokens are",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Text that a trained model writes: the parameters of a run's checkpoint, on one device."""
    from meshwright.training import sample_run

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
    for each in written.rejected:
        print(f"warning: the checkpoint of step {each.step} is damaged: {each.why}", file=sys.stderr)
    if as_json:
        rejected = [{"step": each.step, "why": each.why} for each in written.rejected]
        answer = {name: value for name, value in dataclasses.asdict(written).items() if name != "rejected"}
        print_json({"schema": SAMPLE_SCHEMA, **answer, "rejected": rejected})
    else:
        print(written.prompt + written.text)
