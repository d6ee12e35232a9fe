"""Generate text from the checkpoint of a run, with any tokenizer, on one device of this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from meshwright.config import (
    InstructionData,
    Layout,
    MixtureData,
    RunConfig,
    StdlibData,
    TextData,
    TokenFileData,
    TransformerModel,
)
from meshwright.contrib.texts import Tokenizer, open_tokenizer, read_metadata, tokenizer_path
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.sharding import mesh_of
from meshwright.trainer.checkpoint import Rejected, checkpoint_of, restore
from meshwright.trainer.data import ByteTokenizer
from meshwright.trainer.loop import config_of, devices_of, local_fleet
from meshwright.trainer.step import build_step, whole_parameters

from ._sample import sample_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOfRun:
    """The text that a run's model generates after a prompt; `rejected` lists newer, damaged checkpoints."""

    step: int
    prompt: str
    text: str
    tokens: tuple[int, ...]
    rejected: tuple[Rejected, ...]


def sample_run(
    run: Path,
    *,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int = 0,
    step: int | None = None,
    tokenizer: str | None = None,
    fleet: Fleet | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> SampleOfRun:
    """Restore the parameters of a run's folder, and generate `num_tokens` tokens.

    Only the parameters are placed on the device, and they must fit there. If the prompt is longer than the
    run's sequences, only its end is read. The same seed yields the same text on the same kind of device.

    Args:
        temperature: 0 takes the most likely token each time.
        step: of the checkpoint; by default that of the newest good one.
        tokenizer: "bytes" or a `tokenizer.json`; required if the run's tokens are not known to be bytes.
        fleet: its first device is used; by default the attached fleet.

    Raises:
        InputError: no run or checkpoint exists, the model generates no text, or the prompt cannot be read.
        MeshwrightError: the requested checkpoint is damaged, or all are.
    """
    config = config_of(run)
    if num_tokens < 1 or not 0 <= temperature < math.inf:
        raise InputError(
            f"{num_tokens} tokens at temperature {temperature:g}",
            hint="use at least 1 token, and a finite temperature of 0 or more",
        )
    codec, ids = _prompt(run, config, prompt, tokenizer)
    on_phase("verifying the checkpoint")
    found = checkpoint_of(run, step)
    fleet = local_fleet() if fleet is None else fleet
    device = devices_of(fleet, Layout.parse("data=-1").resolve(fleet.num_devices))[0]
    mesh = mesh_of((("data", 1),), [device])
    state = build_step(config, mesh).state
    wanted = {name: state[name] for name in ("parameters", "frozen") if name in state}
    on_phase("restoring")
    parameters = whole_parameters(restore(found, wanted, only=list(wanted)))
    on_phase("sampling")
    key = jax.random.key(seed)
    tokens = sample_tokens(config, mesh, parameters, ids, key, num_tokens, temperature)
    return SampleOfRun(
        step=found.step,
        prompt=prompt,
        text=codec.decode(tokens),
        tokens=tuple(tokens.tolist()),
        rejected=found.rejected,
    )


def _prompt(run: Path, config: RunConfig, prompt: str, asked: str | None) -> tuple[Tokenizer, np.ndarray]:
    """Return the tokenizer of the run, and the prompt's tokens."""
    if not isinstance(config.model, TransformerModel):
        raise InputError(
            f"{run} trained a {config.model.kind} model, which generates no text",
            hint="name a run of a transformer",
        )
    tokenizer = _tokenizer(config, asked)
    (ids,) = tokenizer.encode([prompt])
    if not len(ids):
        raise InputError("the prompt is empty", hint="give at least one token to continue")
    size = config.model.vocab_size
    if ids.max() >= size:
        raise InputError(
            f"the prompt contains token {ids.max()}, and the model's vocabulary has {size}",
            hint="name the tokenizer that made the run's tokens with --tokenizer",
        )
    return tokenizer, ids.astype(np.int32)


def _tokenizer(config: RunConfig, name: str | None) -> Tokenizer:
    """Return the named tokenizer, or by default bytes if the run's tokens are known to be bytes."""
    data = config.data
    if name is None and isinstance(data, InstructionData | TextData):
        name = tokenizer_path(data.tokenizer)
    path = Path(data.path) if isinstance(data, TokenFileData | MixtureData) else None
    metadata = None if path is None else read_metadata(path)
    if name is not None:
        tokenizer: Tokenizer = open_tokenizer(name)
        if path is not None and metadata is not None and metadata.tokenizer_sha256 != tokenizer.sha256:
            raise InputError(
                f"the run's tokens were made with {metadata.tokenizer}, and {tokenizer.name} is another one",
                hint=f"name the {metadata.tokenizer} that made {path.name}",
            )
        return tokenizer
    if isinstance(data, StdlibData) or (metadata is not None and metadata.tokenizer == "bytes"):
        return ByteTokenizer()
    if path is None:
        what = f"the run was trained on {data.source} tokens, which encode no text"
        raise InputError(what, hint="name a tokenizer nevertheless, with --tokenizer bytes")
    made = "no file beside it says how its tokens were made"
    raise InputError(
        f"the run was trained on {path}: {made if metadata is None else f'made with {metadata.tokenizer}'}",
        hint="name the tokenizer: --tokenizer bytes, or the path of a tokenizer.json",
    )
