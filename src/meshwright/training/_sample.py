"""Generate text from a byte-level Transformer, in a run or from its checkpoint.

Text from a byte-level Transformer, to look at after training.

Text from a run that was saved: its newest whole checkpoint, on one device of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key

from ..checkpoint import Rejected, checkpoint_of, restore
from ..config import Layout, RunConfig, StdlibData, TokenFileData, TransformerModel
from ..data import Tokenizer, open_tokenizer, read_facts
from ..errors import InputError
from ..hardware import Fleet
from ..models import Context, model_of
from ..models.transformer import Transformer
from ..sharding import mesh_of
from ..step import FORMATS, build_step
from ._devices import devices_of, local_fleet
from ._run_folder import config_of

NUM_TOKENS = 160
TEMPERATURE = 0.8
PROMPT_TOKENS = 64
_STREAM = 2  # of the run's key; the state's own keys are 0 and 1


def sampler_of(
    config: RunConfig, mesh: Mesh, num_tokens: int = NUM_TOKENS, temperature: float = TEMPERATURE
) -> Callable[[dict[str, Any], Int[Array, " window"], Int[Array, ""], Key[Array, ""]], Int[Array, " new"]]:
    """A jitted function of parameters, window, how much of the window is filled, and key: new tokens.

    Each token is drawn from the model run on the whole window, whose unfilled end no position before
    it attends to; a full window slides. Nothing is cached from token to token: one shape, one program.
    At temperature 0 the likeliest token is taken.
    """
    model = model_of(config.model)
    assert isinstance(model, Transformer), f"a {config.model.kind} model writes no text"
    dtype = FORMATS[config.precision]
    device = mesh.devices.flat[0]
    platform = "cuda" if device.platform == "gpu" else device.platform
    context = Context(mesh=mesh, dtype=dtype, platform=platform, remat="none")

    def next_token(parameters: dict[str, Any], window: Array, filled: Array, key: Array) -> Array:
        hidden = model.hidden(parameters, window[None], context)[0][0]
        head = model.head(parameters, context)
        logits = (head @ jax.lax.dynamic_index_in_dim(hidden, filled - 1, keepdims=False)).astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / temperature)

    def sample(parameters: dict[str, Any], window: Array, filled: Array, key: Array) -> Array:
        def one(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
            window, filled = carry
            token = next_token(parameters, window, filled, key).astype(window.dtype)
            full = filled == window.shape[0]
            moved = jnp.where(full, jnp.roll(window, -1), window)
            filled = jnp.where(full, filled, filled + 1)
            return (moved.at[filled - 1].set(token), filled), token

        return jax.lax.scan(one, (window, filled), jax.random.split(key, num_tokens))[1]

    return jax.jit(sample)


def sample_tokens(
    config: RunConfig, mesh: Mesh, parameters: dict[str, Any], text: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A prompt, the beginning of `text`, and the 160 tokens that the model writes after it.

    The draw depends on the run's seed alone. `parameters` lie on one device.
    """
    assert isinstance(config.model, TransformerModel), f"a {config.model.kind} model writes no text"
    length = config.batch.sequence_length
    prompt = text[: min(PROMPT_TOKENS, max(length // 2, 1))]
    window = np.zeros(length, np.int32)
    window[: len(prompt)] = prompt
    key = jax.random.fold_in(jax.random.key(config.seed), _STREAM)
    sampler = sampler_of(config, mesh)
    device = mesh.devices.flat[0]
    with jax.default_device(device):
        tokens = sampler(parameters, jnp.asarray(window), jnp.int32(len(prompt)), key)
    return prompt, np.asarray(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOfRun:
    """What a run's model writes behind a prompt. `rejected`: newer checkpoints that are damaged."""

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
    """Restore the parameters of a run's folder, and let them write `num_tokens` tokens.

    Only the parameters are put on the device, which they must fit. Of a prompt longer than the run's
    sequences, the end is read. The same seed gives the same text on one kind of device.

    Args:
        temperature: 0 takes the likeliest token each time.
        step: of the checkpoint; the newest whole one unless told.
        tokenizer: "bytes" or a `tokenizer.json`; needed where the run's tokens are not known to be bytes.
        fleet: whose first device is used; what is attached unless told.

    Raises:
        InputError: no run or checkpoint, a model that writes no text, or a prompt it cannot read.
        MeshwrightError: all checkpoints are damaged.
    """
    config = config_of(run)
    if num_tokens < 1 or not 0 <= temperature < math.inf:
        raise InputError(
            f"{num_tokens} tokens at temperature {temperature:g}",
            hint="use at least 1 token, and a finite temperature of 0 or more",
        )
    known, ids = _prompt(run, config, prompt, tokenizer)
    on_phase("verifying the checkpoint")
    found = checkpoint_of(run, step)
    fleet = local_fleet() if fleet is None else fleet
    device = devices_of(fleet, Layout.parse("data=-1").resolve(fleet.num_devices))[0]
    mesh = mesh_of((("data", 1),), [device])
    wanted = {"parameters": build_step(config, mesh).state["parameters"]}
    on_phase("restoring")
    parameters = restore(found, wanted, only=["parameters"])["parameters"]
    on_phase("sampling")
    window = np.zeros(config.batch.sequence_length, np.int32)
    ids = ids[-len(window) :]
    window[: len(ids)] = ids
    with jax.default_device(device):
        sampler = sampler_of(config, mesh, num_tokens, temperature)
        drawn = sampler(parameters, jnp.asarray(window), jnp.int32(len(ids)), jax.random.key(seed))
    tokens = np.asarray(drawn)
    return SampleOfRun(
        step=found.step,
        prompt=prompt,
        text=known.decode(tokens),
        tokens=tuple(tokens.tolist()),
        rejected=found.rejected,
    )


def _prompt(run: Path, config: RunConfig, prompt: str, asked: str | None) -> tuple[Tokenizer, np.ndarray]:
    """What the run's tokens stand for, and the prompt in them."""
    if not isinstance(config.model, TransformerModel):
        raise InputError(
            f"{run} trained a {config.model.kind} model, which writes no text",
            hint="name a run of a transformer",
        )
    tokenizer = _tokenizer(config, asked)
    (ids,) = tokenizer.encode([prompt])
    if not len(ids):
        raise InputError("the prompt is empty", hint="give at least one token to go on from")
    if ids.max() >= config.model.vocab_size:
        raise InputError(
            f"the prompt holds token {ids.max()}, and the model knows {config.model.vocab_size}",
            hint="name the tokenizer that made the run's tokens with --tokenizer",
        )
    return tokenizer, ids.astype(np.int32)


def _tokenizer(config: RunConfig, asked: str | None) -> Tokenizer:
    """What the run's tokens stand for."""
    if asked is not None:
        return _checked(open_tokenizer(asked), config)
    if isinstance(config.data, StdlibData):
        return open_tokenizer("bytes")
    if not isinstance(config.data, TokenFileData):
        what = f"the run was trained on {config.data.source} tokens, which stand for no text"
        raise InputError(what, hint="name a tokenizer all the same with --tokenizer bytes")
    facts = read_facts(Path(config.data.path))
    if facts is not None and facts.tokenizer == "bytes":
        return open_tokenizer("bytes")
    made = (
        "nothing beside it says how its tokens were made" if facts is None else f"made with {facts.tokenizer}"
    )
    raise InputError(
        f"the run was trained on {config.data.path}: {made}",
        hint="name the tokenizer: --tokenizer bytes, or the path of a tokenizer.json",
    )


def _checked(tokenizer: Tokenizer, config: RunConfig) -> Tokenizer:
    """Another file than the one that made the tokens would write nonsense."""
    if not isinstance(config.data, TokenFileData):
        return tokenizer
    path = Path(config.data.path)
    facts = read_facts(path)
    if facts is not None and facts.tokenizer_sha256 != tokenizer.sha256:
        raise InputError(
            f"the run's tokens were made with {facts.tokenizer}, and {tokenizer.name} is not the same",
            hint=f"name the {facts.tokenizer} that made {path.name}",
        )
    return tokenizer
