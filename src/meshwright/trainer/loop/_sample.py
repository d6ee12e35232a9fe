"""Generate text from a trained Transformer, at the end of a run or from a checkpoint.

At the end of a run this is done only for tokens that are bytes. From a checkpoint (by default the newest good
one) it works with any tokenizer, on one device of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

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
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.sharding import mesh_of
from meshwright.trainer.checkpoint import Rejected, checkpoint_of, restore
from meshwright.trainer.data import (
    ByteTokenizer,
    Dataset,
    MixedWindows,
    Tokenizer,
    TokenWindows,
    read_metadata,
    text_room,
)
from meshwright.trainer.models import Context, model_of
from meshwright.trainer.models.host_layers import with_stand_ins
from meshwright.trainer.models.transformer import Transformer
from meshwright.trainer.step import FORMATS, build_step, whole_parameters

from ._devices import devices_of, local_fleet
from ._interface import Sampled
from ._run_folder import config_of

NUM_TOKENS = 160
TEMPERATURE = 0.8
PROMPT_TOKENS = 64
_STREAM = 2  # folded into the run's key; the state uses 0 and 1


def sample_tokens(
    config: RunConfig,
    mesh: Mesh,
    parameters: dict[str, Any],
    prompt: np.ndarray,
    key: Key[Array, ""],
    num_tokens: int = NUM_TOKENS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Return the tokens that a model on one device generates after a prompt.

    Args:
        prompt: tokens; only the last ones that fit into the run's sequence are read.
    """
    sample = jax.jit(_sampler(config, mesh, num_tokens, temperature))
    with jax.default_device(mesh.devices.flat[0]):
        return np.asarray(sample(parameters, *_window(config, prompt), key))


def _window(config: RunConfig, prompt: np.ndarray) -> tuple[np.ndarray, np.int32]:
    """Return a window of the run's sequence length that begins with the prompt's end, and what it fills."""
    window = np.zeros(config.batch.sequence_length, np.int32)
    prompt = prompt[-len(window) :]
    window[: len(prompt)] = prompt
    return window, np.int32(len(prompt))


def _sampler(config: RunConfig, mesh: Mesh, num_tokens: int, temperature: float) -> Callable[..., Array]:
    """Return the function, not jitted, of parameters, window, filled positions and key, that draws tokens.

    Each token is drawn from the model's output for the whole window. The unfilled positions come last, and no
    filled position attends to them. A full window slides. Nothing is cached from token to token: one shape,
    one program. At temperature 0 the most likely token is taken.
    """
    model = model_of(config.model)
    assert isinstance(model, Transformer), f"a {config.model.kind} model generates no text"
    device = mesh.devices.flat[0]
    platform = "cuda" if device.platform == "gpu" else device.platform
    scale = None if config.lora.rank is None else config.lora.scale
    dtype = FORMATS[config.precision]
    context = Context(mesh=mesh, dtype=dtype, platform=platform, remat="none", adapter_scale=scale)

    def next_token(
        parameters: dict[str, Any], context: Context, window: Array, filled: Array, key: Array
    ) -> Array:
        hidden = model.hidden(parameters, window[None], context)[0][0]
        last = jax.lax.dynamic_index_in_dim(hidden, filled - 1, keepdims=False)
        logits = model.logits(parameters, last, context)
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / temperature)

    def sample(parameters: dict[str, Any], window: Array, filled: Array, key: Array) -> Array:
        if config.waits("parameters"):
            parameters, held = with_stand_ins(parameters)
            used = replace(context, held=held)
        else:
            used = context

        def one(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
            window, filled = carry
            token = next_token(parameters, used, window, filled, key).astype(window.dtype)
            is_full = filled == window.shape[0]
            moved = jnp.where(is_full, jnp.roll(window, -1), window)
            filled = jnp.where(is_full, filled, filled + 1)
            return (moved.at[filled - 1].set(token), filled), token

        return jax.lax.scan(one, (window, filled), jax.random.split(key, num_tokens))[1]

    return sample


def is_sampled(mesh: Mesh, data: Dataset) -> bool:
    """Return whether a run ends with a sample: its tokens are bytes, and the mesh has one device."""
    return isinstance(data, TokenWindows | MixedWindows) and data.is_bytes and mesh.size == 1


def lowered_sample(config: RunConfig, mesh: Mesh, parameters: dict[str, Any]) -> jax.stages.Lowered:
    """Lower the program that `sample_of` runs, for parameters as `parameters` describes them.

    It makes its random key from the run's seed, so that nothing else is compiled when the run ends.
    """
    draw = _sampler(config, mesh, NUM_TOKENS, TEMPERATURE)

    def sample(parameters: dict[str, Any], window: Array, filled: Array, seed: Array) -> Array:
        return draw(parameters, window, filled, jax.random.fold_in(jax.random.key(seed), _STREAM))

    window = jax.ShapeDtypeStruct((config.batch.sequence_length,), np.int32)
    filled, seed = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.uint32)
    return jax.jit(sample).lower(parameters, window, filled, seed)


def sample_of(
    config: RunConfig, sample: Callable[..., Array], parameters: dict[str, Any], data: Dataset
) -> Sampled:
    """Return the 160 tokens that a trained model generates after the beginning of the held-out text.

    Only the run's seed decides the draw. `sample`: the compiled program of `lowered_sample`.
    """
    assert isinstance(data, TokenWindows | MixedWindows), "`is_sampled` is true of the data"
    length = min(PROMPT_TOKENS, max(config.batch.sequence_length // 2, 1))
    prompt = data.batch(0, "held-out")["tokens"][0][:length]
    tokens = np.asarray(sample(parameters, *_window(config, prompt), np.uint32(config.seed)))
    return Sampled(prompt=data.decode(prompt), text=data.decode(tokens))


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
        name = text_room().tokenizer_path(data.tokenizer)
    path = Path(data.path) if isinstance(data, TokenFileData | MixtureData) else None
    metadata = None if path is None else read_metadata(path)
    if name is not None:
        tokenizer: Tokenizer = text_room().open_tokenizer(name)
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
