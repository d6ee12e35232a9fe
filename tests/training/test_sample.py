import jax
import jax.numpy as jnp
import numpy as np

from meshwright.models import Context, model_of
from meshwright.sharding import mesh_of
from meshwright.training._sample import NUM_TOKENS, TEMPERATURE, sample_after


def test_a_sample_is_what_the_model_alone_draws_token_by_token(one_device):
    mesh = mesh_of((("data", 1),), jax.devices()[:1])
    config, parameters = one_device.config, one_device.state["parameters"]
    text = np.arange(65) % 97 + 32
    prompt, tokens = sample_after(config, mesh, parameters, text)
    np.testing.assert_array_equal(prompt, text[:32])
    assert tokens.shape == (NUM_TOKENS,)
    model = model_of(config.model)
    context = Context(mesh=mesh, dtype=jnp.float32, platform="cpu", remat="none")
    keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 2), NUM_TOKENS)
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
