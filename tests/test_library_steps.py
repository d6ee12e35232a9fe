"""Train steps as users of Flax, Equinox, Haiku, Keras, NumPyro and Optax write them, counted by hand.

Each function returns a step, its arguments and its model FLOPs. The steps of `examples/programs` are in
`test_programs.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it when it is imported

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import meshwright as mw

ROWS, WIDTH, HIDDEN, LAYERS, LENGTH = 64, 128, 256, 4, 16


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(rows, inputs, outputs, times=3):
    """FLOPs of a dense layer: forward, its weights' gradient, and its input's unless `times` is 2."""
    return times * 2 * rows * inputs * outputs


# --- Flax Linen


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        hidden = nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden), None


def linen_scanned_and_rematerialised():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            blocks = nn.scan(
                nn.remat(LinenBlock, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            return blocks()(nn.Dense(WIDTH)(x), None)[0]

    model = Network()

    def init(key):
        params = model.init(key, jnp.ones((1, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    @jax.jit
    def step(state, x):
        gradients = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=gradients)

    first = product(ROWS, WIDTH, WIDTH, 2)
    flops = first + LAYERS * 2 * product(ROWS, WIDTH, HIDDEN)
    return step, (mw.abstract(init, jax.random.key(0)), shape(ROWS, WIDTH)), flops


def linen_partitioned():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = nn.initializers.lecun_normal()
            up = nn.Dense(HIDDEN, kernel_init=nn.with_partitioning(kernel, ("data", "model")))
            down = nn.Dense(WIDTH, kernel_init=nn.with_partitioning(kernel, ("model", "data")))
            return down(nn.relu(up(x)))

    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model = Network()

    def init(key):
        params = model.init(key, jnp.ones((1, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    boxed = jax.eval_shape(init, jax.random.key(0))
    state = mw.place(mesh, boxed, nn.get_partition_spec(boxed))

    def step(state, x):
        gradients = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=gradients)

    x = mw.place(mesh, shape(ROWS, WIDTH), PartitionSpec("data"))
    return jax.jit(step, donate_argnums=0), (state, x), 5 * 2 * ROWS * WIDTH * HIDDEN


def linen_recurrent():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(50, WIDTH)(tokens)
            x = nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(x)
            return nn.Dense(50)(x)

    model, optimizer = Network(), optax.rmsprop(1e-3)

    @jax.jit
    def step(params, opt_state, tokens):
        def loss(params):
            logits = model.apply({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        gradients = jax.grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = mw.abstract(lambda key: model.init(key, jnp.zeros((1, 4), int))["params"], jax.random.key(0))
    opt_state = mw.abstract(optimizer.init, params)
    gates = product(ROWS * LENGTH, WIDTH, 4 * HIDDEN) + product(ROWS * LENGTH, HIDDEN, 4 * HIDDEN)
    flops = gates + product(ROWS * LENGTH, HIDDEN, 50)
    return step, (params, opt_state, shape(ROWS, LENGTH + 1, dtype=jnp.int32)), flops


def linen_attention():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(nn.Dense(WIDTH)(x)))
            return nn.Dense(8)(x.mean(axis=1))

    model, optimizer = Network(), optax.lamb(1e-3)

    @jax.jit
    def step(params, opt_state, x):
        gradients = jax.grad(lambda p: jnp.mean(model.apply({"params": p}, x) ** 2))(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    x = shape(ROWS, LENGTH, WIDTH)
    params = mw.abstract(lambda key: model.init(key, jnp.ones(x.shape))["params"], jax.random.key(0))
    tokens = ROWS * LENGTH
    projections = product(tokens, WIDTH, WIDTH, 2) + 4 * product(tokens, WIDTH, WIDTH)
    scores = 3 * 2 * 2 * ROWS * LENGTH**2 * WIDTH
    flops = projections + scores + product(ROWS, WIDTH, 8)
    return step, (params, mw.abstract(optimizer.init, params), x), flops


# --- Flax NNX


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def nnx_scanned_and_rematerialised():
    class Network(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=LAYERS)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def made(rngs):
                return Block(rngs)

            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.blocks = made(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @nnx.remat
            def through(x, block):
                return block(x)

            return through(self.first(x), self.blocks)

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))

    flops = product(ROWS, WIDTH, WIDTH, 2) + LAYERS * 2 * product(ROWS, WIDTH, HIDDEN)
    return step, (model, optimizer, shape(ROWS, WIDTH)), flops


def nnx_split_and_merged():
    graph, params = nnx.split(Block(nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, opt_state, x):
        def loss(params):
            return jnp.mean(nnx.merge(graph, params)(x) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    flops = 2 * product(ROWS, WIDTH, HIDDEN)  # the norm before has parameters: the input's gradient is needed
    return step, (params, mw.abstract(optimizer.init, params), shape(ROWS, WIDTH)), flops


def nnx_convolutional():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 32, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.head = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.conv(x)))
            return self.head(self.dropout(x).mean((1, 2)))

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, metrics, images, labels):
        def loss(model):
            logits = model(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        metrics.update(loss=value)
        optimizer.update(model, gradients)
        return value

    flops = 2 * 2 * ROWS * 28 * 28 * 9 * 3 * 32 + product(ROWS, 32, 10)
    arguments = (model, optimizer, metrics, shape(ROWS, 28, 28, 3), shape(ROWS, dtype=jnp.int32))
    return step, arguments, flops


def nnx_low_rank():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
            self.adapter = nnx.LoRA(WIDTH, 8, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.head(self.base(x) + self.adapter(x))

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, x):
        trained = nnx.DiffState(0, nnx.LoRAParam)
        gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2), argnums=trained)(model)
        optimizer.update(model, gradients)

    frozen = product(ROWS, WIDTH, WIDTH, 1) + product(ROWS, WIDTH, WIDTH, 2)  # no gradients of the matrices
    flops = frozen + product(ROWS, WIDTH, 8, 2) + product(ROWS, 8, WIDTH)
    return step, (model, optimizer, shape(ROWS, WIDTH)), flops


def nnx_recurrent():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.cells = nnx.RNN(nnx.LSTMCell(WIDTH, HIDDEN, rngs=rngs))
            self.head = nnx.Linear(HIDDEN, 10, rngs=rngs)

        def __call__(self, x):
            return self.head(self.cells(x)[:, -1])

    both = nnx.ModelAndOptimizer(Network(nnx.Rngs(0)), optax.adam(1e-3))

    @nnx.jit
    def step(both, x):
        both.update(nnx.grad(lambda model: jnp.mean(model(x) ** 2))(both.model))

    steps = ROWS * LENGTH
    gates = product(steps, WIDTH, 4 * HIDDEN, 2) + product(steps, HIDDEN, 4 * HIDDEN)
    return step, (both, shape(ROWS, LENGTH, WIDTH)), gates + product(ROWS, HIDDEN, 10)


# --- Equinox


def equinox_ensemble():
    members, optimizer = 5, optax.adamw(1e-3)

    @eqx.filter_vmap
    def made(key):
        return eqx.nn.MLP(WIDTH, 1, HIDDEN, 2, key=key)

    ensemble = made(jax.random.split(jax.random.key(0), members))
    opt_state = optimizer.init(eqx.filter(ensemble, eqx.is_array))

    @eqx.filter_jit
    def step(ensemble, opt_state, x):
        @eqx.filter_grad
        def gradient(ensemble):
            of_all = eqx.filter_vmap(lambda member, x: jax.vmap(member)(x), in_axes=(eqx.if_array(0), None))
            return jnp.mean(of_all(ensemble, x) ** 2)

        updates, opt_state = optimizer.update(gradient(ensemble), opt_state, ensemble)
        return eqx.apply_updates(ensemble, updates), opt_state

    each = product(ROWS, WIDTH, HIDDEN, 2) + product(ROWS, HIDDEN, HIDDEN) + product(ROWS, HIDDEN, 1)
    return step, (ensemble, opt_state, shape(ROWS, WIDTH)), members * each


def equinox_recurrent():
    class Network(eqx.Module):
        cell: eqx.nn.GRUCell
        head: eqx.nn.Linear

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.cell = eqx.nn.GRUCell(WIDTH, HIDDEN, key=first)
            self.head = eqx.nn.Linear(HIDDEN, 4, key=second)

        def __call__(self, xs):
            last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(HIDDEN), xs)
            return self.head(last)

    network, optimizer = Network(jax.random.key(0)), optax.adabelief(1e-3)
    opt_state = optimizer.init(eqx.filter(network, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all")
    def step(network, opt_state, xs):
        value, gradients = eqx.filter_value_and_grad(lambda n: jnp.mean(jax.vmap(n)(xs) ** 2))(network)
        updates, opt_state = optimizer.update(gradients, opt_state, network)
        return eqx.apply_updates(network, updates), opt_state, value

    steps = ROWS * LENGTH
    gates = product(steps, WIDTH, 3 * HIDDEN, 2) + product(steps, HIDDEN, 3 * HIDDEN)
    return step, (network, opt_state, shape(ROWS, LENGTH, WIDTH)), gates + product(ROWS, HIDDEN, 4)


def equinox_checkpointed_attention():
    class Network(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=first)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, key=second)

        def __call__(self, x):
            x = jax.vmap(self.norm)(x)
            x = x + eqx.filter_checkpoint(self.attention)(x, x, x)
            return x + jax.vmap(self.mlp)(x)

    network, optimizer = Network(jax.random.key(0)), optax.adamw(1e-3)
    opt_state = optimizer.init(eqx.filter(network, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(network, opt_state, x):
        gradients = eqx.filter_grad(lambda n: jnp.mean(jax.vmap(n)(x) ** 2))(network)
        updates, opt_state = optimizer.update(gradients, opt_state, network)
        return eqx.apply_updates(network, updates), opt_state

    tokens = ROWS * LENGTH
    flops = 4 * product(tokens, WIDTH, WIDTH) + 2 * product(tokens, WIDTH, HIDDEN)
    flops += 3 * 2 * 2 * ROWS * LENGTH**2 * WIDTH
    return step, (network, opt_state, shape(ROWS, LENGTH, WIDTH)), flops


# --- Haiku


def haiku_recurrent():
    def forward(tokens):
        x = hk.Embed(50, WIDTH)(tokens).swapaxes(0, 1)
        core = hk.LSTM(HIDDEN)
        hidden, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[0]))
        return hk.Linear(50)(hidden)

    network, optimizer = hk.without_apply_rng(hk.transform(forward)), optax.adam(1e-3)

    @jax.jit
    def step(params, opt_state, tokens):
        def loss(params):
            logits = network.apply(params, tokens[:, :-1])
            labels = tokens[:, 1:].swapaxes(0, 1)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        gradients = jax.grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = mw.abstract(network.init, jax.random.key(0), jnp.zeros((1, 4), int))
    gates = product(ROWS * LENGTH, WIDTH + HIDDEN, 4 * HIDDEN)
    flops = gates + product(ROWS * LENGTH, HIDDEN, 50)
    tokens = shape(ROWS, LENGTH + 1, dtype=jnp.int32)
    return step, (params, mw.abstract(optimizer.init, params), tokens), flops


def haiku_layers():
    def forward(x):
        def block(x):
            hidden = jax.nn.gelu(hk.Linear(HIDDEN, name="up")(x))
            return x + hk.Linear(WIDTH, name="down")(hidden)

        return hk.experimental.layer_stack(LAYERS)(hk.remat(block))(x)

    network, optimizer = hk.without_apply_rng(hk.transform(forward)), optax.adam(1e-3)

    @jax.jit
    def step(params, opt_state, x):
        gradients = jax.grad(lambda params: jnp.mean(network.apply(params, x) ** 2))(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state

    x = shape(ROWS, WIDTH)
    params = mw.abstract(network.init, jax.random.key(0), x)
    flops = LAYERS * 2 * product(ROWS, WIDTH, HIDDEN)  # a loop: the first layer's input has a gradient, too
    return step, (params, mw.abstract(optimizer.init, params), x), flops


def haiku_mixed_precision():
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    hk.mixed_precision.set_policy(hk.nets.MLP, policy)
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([HIDDEN, HIDDEN, 1])(x)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    scale = jmp.DynamicLossScale(jnp.asarray(2.0**15))

    @jax.jit
    def step(params, opt_state, scale, x):
        gradients = jax.grad(lambda p: scale.scale(jnp.mean(network.apply(p, x) ** 2)))(params)
        gradients = scale.unscale(policy.cast_to_param(gradients))
        finite = jmp.all_finite(gradients)
        updates, new_state = optimizer.update(gradients, opt_state)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jmp.select_tree(finite, (new_params, new_state), (params, opt_state))
        return params, opt_state, scale.adjust(finite)

    params = mw.abstract(network.init, jax.random.key(0), jnp.zeros((1, WIDTH)))
    flops = product(ROWS, WIDTH, HIDDEN, 2) + product(ROWS, HIDDEN, HIDDEN) + product(ROWS, HIDDEN, 1)
    return step, (params, mw.abstract(optimizer.init, params), scale, shape(ROWS, WIDTH)), flops


# --- Keras 3 on JAX


def keras_convolutional():
    import keras

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2D(32, 3),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trainable, non_trainable, x, y):
        logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return loss_fn(y, logits), non_trainable

    @jax.jit
    def step(state, x, y):
        trainable, non_trainable, optimizer_variables = state
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, non_trainable), gradients = gradient(trainable, non_trainable, x, y)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        return value, (trainable, non_trainable, optimizer_variables)

    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple([each.value for each in part] for part in variables)
    flops = 2 * 2 * ROWS * 14 * 14 * 9 * 16 + 3 * 2 * ROWS * 12 * 12 * 9 * 16 * 32 + product(ROWS, 32, 10)
    return step, (state, shape(ROWS, 28, 28, 1), shape(ROWS, dtype=jnp.int32)), flops


# --- numpyro


def numpyro_variational():
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDiagonalNormal

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros((WIDTH, HIDDEN)), 1).to_event(2))
        v = numpyro.sample("v", dist.Normal(jnp.zeros((HIDDEN, 1)), 1).to_event(2))
        mean = jnp.tanh(x @ w) @ v
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(mean[:, 0], 0.1), obs=y)

    svi = SVI(model, AutoDiagonalNormal(model), numpyro.optim.Adam(1e-3), Trace_ELBO())
    x, y = jnp.ones((ROWS, WIDTH)), jnp.ones(ROWS)
    state = svi.init(jax.random.key(0), x, y)
    flops = product(ROWS, WIDTH, HIDDEN, 2) + product(ROWS, HIDDEN, 1)
    return jax.jit(svi.update), (state, x, y), flops


# --- Optax


def parameters():
    return {"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)}


def with_optimizer(optimizer, extra=0):
    @jax.jit
    def step(params, opt_state, x):
        gradients = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = parameters()
    flops = 5 * 2 * ROWS * WIDTH * HIDDEN + extra
    return step, (params, mw.abstract(optimizer.init, params), shape(ROWS, WIDTH)), flops


def optax_accumulated():
    return with_optimizer(optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4))


def optax_factored():
    return with_optimizer(optax.adafactor(1e-3))


def optax_muon():
    # Five iterations of Newton and Schulz for each matrix: X X^T over the long side, its square, and times X.
    short, long = min(WIDTH, HIDDEN), max(WIDTH, HIDDEN)
    each = 2 * (2 * short * short * long) + 2 * short**3
    return with_optimizer(optax.contrib.muon(1e-3), extra=2 * 5 * each)


def optax_lookahead():
    optimizer = optax.lookahead(optax.sgd(0.1), sync_period=6, slow_step_size=0.5)

    @jax.jit
    def step(params, opt_state, x):
        def loss(p):
            return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

        updates, opt_state = optimizer.update(jax.grad(loss)(params.fast), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = mw.abstract(lambda p: optax.LookaheadParams.init_synced(p), parameters())
    opt_state = mw.abstract(optimizer.init, params)
    return step, (params, opt_state, shape(ROWS, WIDTH)), 5 * 2 * ROWS * WIDTH * HIDDEN


def optax_sharpness_aware():
    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True)

    @jax.jit
    def step(params, opt_state, x):
        def gradient(p, _=None):
            return jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(p)

        updates, opt_state = optimizer.update(gradient(params), opt_state, params, grad_fn=gradient)
        return optax.apply_updates(params, updates), opt_state

    params = parameters()
    opt_state = mw.abstract(optimizer.init, params)
    return step, (params, opt_state, shape(ROWS, WIDTH)), 2 * 5 * 2 * ROWS * WIDTH * HIDDEN


STEPS = (
    linen_scanned_and_rematerialised,
    linen_partitioned,
    linen_recurrent,
    linen_attention,
    nnx_scanned_and_rematerialised,
    nnx_split_and_merged,
    nnx_convolutional,
    nnx_low_rank,
    nnx_recurrent,
    equinox_ensemble,
    equinox_recurrent,
    equinox_checkpointed_attention,
    haiku_recurrent,
    haiku_layers,
    haiku_mixed_precision,
    keras_convolutional,
    numpyro_variational,
    optax_accumulated,
    optax_factored,
    optax_muon,
    optax_lookahead,
    optax_sharpness_aware,
)


def outside_any_scope(weighing):
    """Return the shares of the FLOPs, and of the bytes at the peak beside the arguments, without a scope."""
    flops, memory = weighing.ledger.flops, weighing.ledger.memory
    arguments = {each.path for each in weighing.compiled.arguments}
    made = [each for each in memory.buffers if each.operation not in arguments]
    nowhere = sum(each.num_bytes for each in made if not each.module)
    return flops.by_module.get("", 0) / flops.executed, nowhere / sum(each.num_bytes for each in made)


@pytest.fixture
def keeps_precision():
    """Take back what a step sets for Haiku's modules."""
    yield
    hk.mixed_precision.clear_policy(hk.nets.MLP)


@pytest.mark.wide
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # a batch that is donated
def test_a_step_of_a_library_has_the_flops_counted_by_hand(make, keeps_precision, forked_workers):
    with jax.numpy_rank_promotion("allow"):  # Keras adds biases that way
        step, args, flops = make()
        weighed = mw.weigh(mw.jax_step(step, *args), on="8xH100")
    assert weighed.ledger.flops.model == flops
    assert weighed.ledger.unpriced == ()
    assert weighed.fits is True
    assert max(outside_any_scope(weighed)) <= 0.1
    roles = {each.role for each in weighed.compiled.arguments}
    assert "arguments" not in weighed.ledger.memory.by_category
    if make is optax_sharpness_aware:
        assert "parameters" in roles  # of its optimizer's state the opaque step uses nothing
    elif make is keras_convolutional:
        assert "state" in roles  # lists in a tuple: nothing says what is what
    elif make is numpyro_variational:
        assert "svi_state" in roles  # parameters and moments in one tuple
    else:
        assert {"parameters", "optimizer_state"} <= roles


@pytest.mark.wide
def test_a_step_of_no_u_turn_sampling_counts_one_round_and_says_so(forked_workers):
    from numpyro.infer import NUTS

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros((WIDTH, 8)), 1).to_event(2))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(jnp.sum(x @ w, axis=1), 1.0), obs=y)

    kernel, x, y = NUTS(model), jnp.ones((ROWS, WIDTH)), jnp.ones(ROWS)
    state = kernel.init(jax.random.key(0), 10, None, (x, y), {})
    weighed = mw.weigh(
        mw.jax_step(jax.jit(lambda state, x, y: kernel.sample(state, (x, y), {})), state, x, y), on="1xH100"
    )
    assert weighed.ledger.flops.model > 0
    assert any(
        "while of unknown length" in line and "counted once" in line for line in weighed.ledger.unpriced
    )


@pytest.mark.wide
def test_fit_of_keras_is_weighed_in_an_unchanged_script(tmp_path, forked_workers):
    (tmp_path / "fit.py").write_text("""
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np
layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dropout(0.1), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input((64,)), *layers])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
model.fit(np.ones((320, 64), "float32"), np.ones(320, int), batch_size=32, epochs=2)
""")
    weighed = mw.weigh(mw.script("python", str(tmp_path / "fit.py")), on="1xH100")
    assert weighed.ledger.flops.model == product(32, 64, 128, 2) + product(32, 128, 10)
    assert max(outside_any_scope(weighed)) <= 0.1
