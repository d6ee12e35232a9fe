"""Reinforcement learning: rollouts in an environment written in JAX, then updates by PPO.

Weigh it as it is: `meshwright weigh --on 1xH100 -- python examples/programs/reinforcement.py`.

This has the shape of a training step in Brax, thousands of environments in one program. Brax 0.14.2 itself
does not run on JAX 0.10: it calls `jax.device_put_replicated`, which is gone. The environment is a pendulum.
PPO: Schulman et al. 2017 (arXiv 1707.06347). Advantages: Schulman et al. 2015 (arXiv 1506.02438).
"""

import jax
import jax.numpy as jnp
import optax

ENVIRONMENTS, STEPS, EPOCHS, MINIBATCHES, HIDDEN = 2048, 32, 4, 8, 256
OBSERVATIONS, ACTIONS = 3, 1
DISCOUNT, MIXING, CLIP = 0.97, 0.95, 0.2
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))


def initial_parameters(key):
    """Return the policy's and the value's matrices: two hidden layers each."""

    def layers(key, outputs):
        sizes = (OBSERVATIONS, HIDDEN, HIDDEN, outputs)
        keys = jax.random.split(key, 3)
        pairs = zip(keys, sizes, sizes[1:], strict=False)
        return [jax.random.normal(key, (here, there)) / here**0.5 for key, here, there in pairs]

    policy, value = jax.random.split(key)
    return {"policy": layers(policy, ACTIONS), "value": layers(value, 1), "log_scale": jnp.zeros(ACTIONS)}


def through(matrices, x):
    """The last layer's output for observations [..., 3]."""
    for matrix in matrices[:-1]:
        x = jnp.tanh(x @ matrix)
    return x @ matrices[-1]


def log_probability(params, observation, action):
    """Log density of actions under the policy, summed over an action's numbers."""
    deviation = (action - through(params["policy"], observation)) * jnp.exp(-params["log_scale"])[None]
    return jnp.sum(-0.5 * deviation**2 - params["log_scale"][None] - 0.5 * jnp.log(2 * jnp.pi), axis=-1)


def observed(state):
    """Observations [environments, 3] of angle and speed."""
    angle, speed = state
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], axis=-1)


def pendulum(state, action):
    """Angle and speed after 0.05 s, and the reward."""
    angle, speed = state
    torque = 2 * jnp.tanh(action[:, 0])
    reward = -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    angle = jnp.mod(angle + 0.05 * speed + jnp.pi, 2 * jnp.pi) - jnp.pi
    return (angle, speed), reward


def rollout(params, state, key):
    """Run every environment for STEPS steps: the states after them, and [steps, environments] of each."""

    def one(state, key):
        observation = observed(state)
        mean = through(params["policy"], observation)
        action = mean + jnp.exp(params["log_scale"])[None] * jax.random.normal(key, mean.shape)
        after, reward = pendulum(state, action)
        value = through(params["value"], observation)[:, 0]
        return after, (observation, action, log_probability(params, observation, action), reward, value)

    return jax.lax.scan(one, state, jax.random.split(key, STEPS))


def advantages(rewards, values, last):
    """Generalised advantage estimates [steps, environments]."""

    def back(carry, now):
        advantage, after = carry
        reward, value = now
        advantage = reward + DISCOUNT * after - value + DISCOUNT * MIXING * advantage
        return (advantage, value), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last), last), (rewards, values), reverse=True)[1]


def loss(params, batch):
    """PPO's clipped loss of the policy, and the value's squared error."""
    observation, action, before, advantage, target = batch
    ratio = jnp.exp(log_probability(params, observation, action) - before)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    error = through(params["value"], observation)[:, 0] - target
    return 0.5 * jnp.mean(error**2) - jnp.mean(gain)


@jax.jit
def train_step(params, opt_state, environments, key):
    """One iteration: a rollout, then EPOCHS passes over it in MINIBATCHES random parts."""
    of_rollout, of_order = jax.random.split(key)
    environments, parts = rollout(params, environments, of_rollout)
    observations, actions, before, rewards, values = parts
    last = through(params["value"], observed(environments))[:, 0]
    gains = advantages(rewards, values, last)
    count = ENVIRONMENTS * STEPS
    flat = [
        part.reshape(count, *part.shape[2:])
        for part in (observations, actions, before, gains, gains + values)
    ]

    def epoch(carry, key):
        order = jax.random.permutation(key, count).reshape(MINIBATCHES, -1)

        def update(carry, rows):
            params, opt_state = carry
            gradients = jax.grad(loss)(params, [part[rows] for part in flat])
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        return jax.lax.scan(update, carry, order)

    (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), jax.random.split(of_order, EPOCHS))
    return params, opt_state, environments, rewards.mean()


def main():
    """Swing the pendulum up."""
    params = initial_parameters(jax.random.key(0))
    opt_state, key = optimizer.init(params), jax.random.key(1)
    environments = (jnp.full(ENVIRONMENTS, jnp.pi), jnp.zeros(ENVIRONMENTS))
    for iteration in range(50):
        params, opt_state, environments, reward = train_step(
            params, opt_state, environments, jax.random.fold_in(key, iteration)
        )
        print(iteration, reward)


if __name__ == "__main__":
    main()
