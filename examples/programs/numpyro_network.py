"""A Bayesian neural network in NumPyro: one update of stochastic variational inference.

Weigh it as it is: `meshwright weigh examples/programs/numpyro_network.py:program --on 1xH100`.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal

ROWS, INPUTS, HIDDEN = 1024, 32, 256


def network(rows, targets=None):
    """Two layers whose weights have normal priors; rows [rows, inputs]."""
    first = numpyro.sample("first", dist.Normal(jnp.zeros((INPUTS, HIDDEN)), 1).to_event(2))
    second = numpyro.sample("second", dist.Normal(jnp.zeros((HIDDEN, HIDDEN)), 1).to_event(2))
    last = numpyro.sample("last", dist.Normal(jnp.zeros(HIDDEN), 1).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    mean = jnp.tanh(jnp.tanh(rows @ first) @ second) @ last
    with numpyro.plate("rows", rows.shape[0]):
        numpyro.sample("targets", dist.Normal(mean, noise), obs=targets)


def program():
    """Return the update and its arguments."""
    inference = SVI(network, AutoDiagonalNormal(network), numpyro.optim.Adam(1e-3), Trace_ELBO())
    rows, targets = jnp.ones((ROWS, INPUTS)), jnp.ones(ROWS)
    state = inference.init(jax.random.key(0), rows, targets)
    return jax.jit(inference.update, donate_argnums=0), (state, rows, targets)
