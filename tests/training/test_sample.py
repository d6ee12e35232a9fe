from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import RunConfig, load_config
from meshwright.contrib.trained import NUM_TOKENS, TEMPERATURE, sample_run, sample_tokens
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.sharding import mesh_of
from meshwright.trainer.checkpoint import Checkpoints
from meshwright.trainer.loop import config_of
from meshwright.trainer.models import Context, model_of
from meshwright.trainer.step import build_step

pytestmark = pytest.mark.quick

ON = Fleet.parse("1xCPU")


def saved_run(folder: Path, config: RunConfig) -> Any:
    """A run's folder as `train` leaves it before its first step, from eight devices; its parameters."""
    mesh = mesh_of((("data", 1), ("fsdp", 4), ("tensor", 2)), jax.devices()[:8])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    state = build_step(config, mesh).init(np.uint32(7))
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in (10, 20):
        checkpoints.save(step, state, {})
    checkpoints.close()
    return jax.tree.map(np.asarray, state["parameters"])


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig, Any]:
    folder, config = tmp_path_factory.mktemp("runs") / "nano", load_config("bytes-nano")
    return folder, config, saved_run(folder, config)


def with_data(nano: tuple[Path, RunConfig, Any], folder: Path, facts: dict[str, Any] | None) -> Path:
    """The same run, as if trained on a token file of which `facts` are known."""
    tokens = folder / "tokens.bin"
    np.zeros(10, np.uint16).tofile(tokens)
    if facts is not None:
        known = {"schema": 1, "dtype": "uint16", "end_of_document": None, "inputs": []}
        known |= {"num_tokens": 10, "num_documents": 1, **facts}
        (folder / "tokens.bin.json").write_text(json.dumps(known))
    config = nano[1].model_dump(mode="json")
    config["data"] = {"source": "tokens", "path": str(tokens), "dtype": "uint16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "checkpoints").symlink_to(nano[0] / "checkpoints")
    return folder


def sampled(run: Path, **options: Any) -> Any:
    options = {"prompt": "def ", "num_tokens": 12, "temperature": 0.8, **options}
    return sample_run(run, fleet=ON, **options)


def test_at_temperature_0_each_token_is_the_likeliest_after_those_before_it(
    nano: tuple[Path, RunConfig, Any],
):
    folder, config, parameters = nano
    written = sampled(folder, temperature=0)
    assert (written.step, written.prompt, written.rejected) == (20, "def ", ())
    mesh = mesh_of((("data", 1),), jax.devices()[:1])
    context = Context(mesh=mesh, dtype=jnp.float32, platform="cpu", remat="none")
    model, so_far = model_of(config.model), list(b"def ")
    hidden_of = jax.jit(lambda parameters, tokens: model.hidden(parameters, tokens, context))
    head = parameters.get("head", parameters["embedding"])
    for token in written.tokens:
        window = np.zeros((1, 64), np.int32)
        window[0, : len(so_far)] = so_far
        hidden = np.asarray(hidden_of(parameters, window)[0])[0, len(so_far) - 1]
        assert int(np.argmax(head @ hidden)) == token
        so_far.append(token)
    assert written.text == bytes(written.tokens).decode(errors="replace")


def test_the_seed_alone_decides_the_draw(nano: tuple[Path, RunConfig, Any]):
    folder = nano[0]
    assert sampled(folder) == sampled(folder)
    assert sampled(folder, seed=1).tokens != sampled(folder).tokens


def test_of_a_long_prompt_the_end_is_read(nano: tuple[Path, RunConfig, Any]):
    long = "x" * 100 + "y" * 64
    assert sampled(nano[0], prompt=long).tokens == sampled(nano[0], prompt="y" * 64).tokens


def test_the_checkpoint_of_a_step_can_be_chosen(nano: tuple[Path, RunConfig, Any]):
    assert sampled(nano[0], step=10).step == 10


def test_tokens_that_are_known_to_be_bytes_need_no_tokenizer(
    nano: tuple[Path, RunConfig, Any], tmp_path: Path
):
    facts = {"tokenizer": "bytes", "tokenizer_sha256": None, "vocab_size": 256}
    assert sampled(with_data(nano, tmp_path, facts)).tokens == sampled(nano[0]).tokens


def test_tokens_of_another_tokenizer_need_that_one(nano: tuple[Path, RunConfig, Any], tmp_path: Path):
    facts = {"tokenizer": "tokenizer.json", "tokenizer_sha256": "ab", "vocab_size": 256}
    run = with_data(nano, tmp_path, facts)
    with pytest.raises(InputError, match=r"tokens\.bin: made with tokenizer\.json") as told:
        sampled(run)
    assert told.value.hint.startswith("name the tokenizer: --tokenizer bytes")
    with pytest.raises(InputError, match=r"made with tokenizer\.json, and bytes is another one") as told:
        sampled(run, tokenizer="bytes")
    assert told.value.hint == "name the tokenizer.json that made tokens.bin"


def test_tokens_of_which_nothing_is_known_need_a_tokenizer(nano: tuple[Path, RunConfig, Any], tmp_path: Path):
    run = with_data(nano, tmp_path, None)
    with pytest.raises(InputError, match="no file beside it says how its tokens were made"):
        sampled(run)
    assert sampled(run, tokenizer="bytes").tokens == sampled(nano[0]).tokens


def test_random_tokens_stand_for_no_text_unless_told(nano: tuple[Path, RunConfig, Any], tmp_path: Path):
    run = with_data(nano, tmp_path, None)
    config = {**nano[1].model_dump(mode="json"), "data": {"source": "synthetic"}}
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="trained on synthetic tokens, which encode no text"):
        sampled(run)
    assert sampled(run, tokenizer="bytes").tokens == sampled(nano[0]).tokens


def test_a_prompt_the_model_cannot_read_is_told(nano: tuple[Path, RunConfig, Any], tmp_path: Path):
    with pytest.raises(InputError, match="the prompt is empty"):
        sampled(nano[0], prompt="")
    run = with_data(nano, tmp_path, None)
    config = nano[1].model_dump(mode="json")
    config["model"]["vocab_size"] = 100
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="the prompt contains token 102, and the model's vocabulary has 100"):
        sampled(run)


def test_numbers_that_make_no_sense_are_told(nano: tuple[Path, RunConfig, Any]):
    with pytest.raises(InputError, match=r"12 tokens at temperature -1\n"):
        sampled(nano[0], temperature=-1.0)


def test_a_model_of_no_text_is_told(tmp_path: Path):
    (tmp_path / "config.json").write_text(load_config("linear").model_dump_json())
    with pytest.raises(InputError, match="trained a linear model, which generates no text"):
        sampled(tmp_path)


def test_a_folder_that_is_no_run_is_told(tmp_path: Path):
    with pytest.raises(InputError, match=r"is not a run: config\.json cannot be read: No such file"):
        config_of(tmp_path)
    (tmp_path / "config.json").write_text('{"name": "x"}')
    with pytest.raises(InputError, match="is not a config of this release: model: Field required"):
        config_of(tmp_path)


def test_a_sample_is_what_the_model_alone_draws_token_by_token(one_device):
    mesh = mesh_of((("data", 1),), jax.devices()[:1])
    config, parameters = one_device.config, one_device.state["parameters"]
    prompt = np.arange(32) % 97 + 32
    key = jax.random.fold_in(jax.random.key(config.seed), 2)
    tokens = sample_tokens(config, mesh, parameters, prompt, key)
    assert tokens.shape == (NUM_TOKENS,)
    model = model_of(config.model)
    context = Context(mesh=mesh, dtype=jnp.float32, platform="cpu", remat="none")
    keys = jax.random.split(key, NUM_TOKENS)
    # The exact text so far, nothing padded; at 32 the window of 64 is full, and slides from there on.
    hidden_of = jax.jit(lambda parameters, tokens: model.hidden(parameters, tokens, context))
    for place in (0, 32, 33, 159):
        so_far = np.concatenate([prompt, tokens[:place]])[-64:]
        hidden = hidden_of(parameters, jnp.asarray(so_far, jnp.int32)[None])[0][0, -1]
        logits = parameters.get("head", parameters["embedding"]) @ hidden
        assert jax.random.categorical(keys[place], logits / TEMPERATURE) == tokens[place]


def test_the_run_shows_the_held_out_text_as_the_prompt(one_device):
    measurement = one_device.measurement
    assert 0 < len(measurement.sample_prompt) <= 32
    assert 0 < len(measurement.sample) <= NUM_TOKENS
