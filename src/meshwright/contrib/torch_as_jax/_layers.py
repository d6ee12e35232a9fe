"""ATen operations of layers as JAX functions: products, attention, norms, windows, dropout, losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._elementwise import magnitude

Rule = Callable[..., Any]
Attention = Callable[..., jax.Array]
USES_ATTENTION = frozenset({"aten::scaled_dot_product_attention"})


def _wide(x: Any) -> Any:
    """Return values in float32 or wider, the format in which PyTorch computes norms and losses."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    made = lax.dot_general(input, weight, (((input.ndim - 1,), (1,)), ((), ())))
    return made if bias is None else made + bias


def _addmm(self: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    made = mat1 @ mat2
    made = made if alpha == 1 else alpha * made
    return made if beta == 0 else made + (self if beta == 1 else beta * self)


def _grouped(input: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Multiply groups of rows, which end at `offs`, by one matrix each."""
    if input.ndim != 2 or weight.ndim != 3 or bias is not None:
        what = "only rows [rows, inner] with matrices [groups, inner, columns] and no bias have a rule"
        raise NotImplementedError(what)
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros(1, jnp.int32))
    return lax.ragged_dot(input, weight, sizes)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attention: Attention,
    random: Any = None,
) -> Any:
    """Compute attention of arrays [batch, heads, length, head_dim], or without heads."""
    if query.ndim == 3:  # without heads: one
        query, key, value = (x[:, None] for x in (query, key, value))
        attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        made = _attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            attention=attention,
            random=random,
        )
        return made[:, 0]
    if query.ndim != 4:
        raise NotImplementedError(f"attention of {query.ndim} dims has no rule")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    batch = jnp.broadcast_shapes(*((x.shape[0],) for x in (query, key, value)))[0]
    query, key, value = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (query, key, value))
    with jax.named_scope("attention"):
        how = {"mask": attn_mask, "causal": is_causal, "scale": scale}
        if dropout_p:
            made = _dropped_attention(query, key, value, **how, rate=dropout_p, random=random)
        else:
            made = attention(query, key, value, **how)
    return jnp.swapaxes(made, 1, 2)


def plain_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, causal: bool, scale: float
) -> jax.Array:
    """Compute attention by `jax.nn.dot_product_attention`, which holds the scores.

    Args:
        query, key, value: [batch, length, heads, head_dim]; groups of query heads may share a key head.
        mask: booleans, True where attention is allowed, or numbers that are added to the scores; or None.
        causal: whether query i sees keys 0 to i.
        scale: of the scores.
    """
    is_boolean = mask is not None and mask.dtype == jnp.bool_
    mask = _of_four_dims(mask)
    with jax.named_scope(needed_share(query.shape[1], key.shape[1]) if causal else "needed_1_of_1"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias=None if is_boolean or mask is None else mask.astype(query.dtype),
            mask=mask if is_boolean else None,
            scale=scale,
            is_causal=causal,
            implementation="xla",
        )


def needed_share(queries: int, keys: int) -> str:
    """Return the scope that says which share of the scores causal attention needs."""
    seen = min(queries, keys)
    needed = seen * seen + 2 * (queries - seen) * keys
    return f"needed_{needed}_of_{2 * queries * keys}"


def _of_four_dims(mask: Any) -> Any:
    return mask if mask is None else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _dropped_attention(
    query: Any, key: Any, value: Any, *, mask: Any, causal: bool, scale: float, rate: float, random: Any
) -> Any:
    """Compute attention with dropout of its weights, which are held."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) if groups > 1 else x for x in (key, value))
    scores = _wide(jnp.einsum("bqhd,bkhd->bhqk", query, key)) * scale
    if causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
        scores = jnp.where(seen, scores, -jnp.inf)
    if mask is not None:
        mask = _of_four_dims(mask)
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    weights, _ = _dropout(weights, rate, True, random=random)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def _dropout(input: Any, p: float, train: Any = True, *, random: Any) -> Any:
    """Return the values that are kept, scaled, and which are kept."""
    if train is False or p == 0:
        return input, jnp.ones(input.shape, jnp.bool_)
    if p == 1:
        return jnp.zeros_like(input), jnp.zeros(input.shape, jnp.bool_)
    kept = jax.random.bernoulli(random, 1 - p, input.shape)
    return jnp.where(kept, input / (1 - p), jnp.zeros_like(input)), kept


def _bernoulli(self: Any, p: Any = None, *, random: Any, **_: Any) -> Any:
    return jax.random.bernoulli(random, self if p is None else p, self.shape)


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if scale_grad_by_freq:
        raise NotImplementedError("gradients that are scaled by frequency have no rule")
    rows = jnp.take(weight, indices, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


def _layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    dims = tuple(range(-len(normalized_shape), 0))
    x = _wide(input)
    centred = x - x.mean(dims, keepdims=True)
    made = centred * lax.rsqrt(jnp.square(centred).mean(dims, keepdims=True) + eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def _rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    dims = tuple(range(-len(normalized_shape), 0))
    x = _wide(input)
    eps = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    made = x * lax.rsqrt(jnp.square(x).mean(dims, keepdims=True) + eps)
    return made if weight is None else made * weight


def _group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    x = _wide(input).reshape(input.shape[0], num_groups, -1)
    centred = x - x.mean(-1, keepdims=True)
    made = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    made = made.reshape(input.shape)
    made = made if weight is None else made * _by_channel(weight, input)
    return made if bias is None else made + _by_channel(bias, input)


def _by_channel(x: Any, like: Any) -> Any:
    return x.reshape((1, -1, *[1] * (like.ndim - 2)))


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return the result, mean and inverse deviation in use, running mean and variance after the step."""
    x, dims = _wide(input), (0, *range(2, input.ndim))
    if training:
        mean = x.mean(dims)
        var = jnp.square(x - _by_channel(mean, x)).mean(dims)
        count = x.size // x.shape[1]
        unbiased = var * (count / max(count - 1, 1))
        running = tuple(
            None if old is None else lax.stop_gradient((1 - momentum) * old + momentum * new)
            for old, new in ((running_mean, mean), (running_var, unbiased))
        )
    else:
        mean, var = running_mean, running_var
        running = running_mean, running_var
    inverse = lax.rsqrt(var + eps)
    made = (x - _by_channel(mean, x)) * _by_channel(inverse, x)
    made = made if weight is None else made * _by_channel(weight, x)
    made = made if bias is None else made + _by_channel(bias, x)
    return made, mean, inverse, *running


def _batch_norm_of_running(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    made, *_ = _batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)
    empty = jnp.zeros(0, input.dtype)
    return made, empty, empty


def _each(value: Any, num: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * num if len(values) == 1 else values


def _convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    num = weight.ndim - 2
    is_single = input.ndim == num + 1
    if is_single:
        input = input[None]
    stride, dilation = _each(stride, num), _each(dilation, num)
    spatial = "".join("DHW"[-num:])
    dims = lax.conv_dimension_numbers(
        input.shape, weight.shape, (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    )
    if transposed:
        made = _transposed(
            input, weight, stride, _each(padding, num), dilation, _each(output_padding, num), groups
        )
    else:
        widths: Any = padding.upper() if isinstance(padding, str) else [(p, p) for p in _each(padding, num)]
        if widths == "SAME":  # PyTorch puts the odd one at the end too
            spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            widths = [(span // 2, span - span // 2) for span in spans]
        made = lax.conv_general_dilated(
            input,
            weight,
            stride,
            widths,
            rhs_dilation=dilation,
            dimension_numbers=dims,
            feature_group_count=groups,
        )
    made = made if bias is None else made + _by_channel(bias, made)
    return made[0] if is_single else made


def _transposed(
    input: Any,
    weight: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
) -> Any:
    """Compute a transposed convolution: over the input with zeros between its entries, the kernel flipped."""
    num = weight.ndim - 2
    inner, outer, *window = weight.shape
    kernel = jnp.flip(weight, tuple(range(2, weight.ndim)))
    kernel = jnp.swapaxes(kernel.reshape(groups, inner // groups, outer, *window), 1, 2)
    kernel = kernel.reshape(groups * outer, inner // groups, *window)
    widths = [
        (d * (k - 1) - p, d * (k - 1) - p + more)
        for d, k, p, more in zip(dilation, window, padding, output_padding, strict=True)
    ]
    spatial = "DHW"[-num:]
    return lax.conv_general_dilated(
        input,
        kernel,
        [1] * num,
        widths,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        feature_group_count=groups,
    )


def _conv(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    return _convolution(input, weight, bias, stride, padding, dilation, False, 0, groups)


def _conv_transpose(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return _convolution(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _windows(
    x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, num: int
) -> tuple[Any, Any, Any, Any]:
    """Return window, strides, padding and dilation over all dims; a rounded-up size pads the end more."""
    kernel, padding, dilation = _each(kernel, num), _each(padding, num), _each(dilation, num)
    stride = _each(stride, num) if stride not in ([], None) else kernel
    ends = []
    for n, k, s, p, d in zip(x.shape[-num:], kernel, stride, padding, dilation, strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        count = -(-span // s) if ceil_mode else span // s
        if ceil_mode and count * s >= n + p:  # no window begins beyond the end
            count -= 1
        ends.append((p, max(p, count * s + d * (k - 1) + 1 - n - p)))
    lead = x.ndim - num
    return (
        (1,) * lead + tuple(kernel),
        (1,) * lead + tuple(stride),
        [(0, 0)] * lead + ends,
        (1,) * lead + tuple(dilation),
    )


def _max_pool(num: int) -> Rule:
    def rule(
        self: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        window, strides, widths, dilations = _windows(
            self, kernel_size, list(stride) if not isinstance(stride, int) else stride, padding, dilation,
            ceil_mode, num,
        )  # fmt: skip
        least = -jnp.inf if jnp.issubdtype(self.dtype, jnp.floating) else jnp.iinfo(self.dtype).min
        low = np.array(least, self.dtype)
        if max(dilations) == 1:
            return lax.reduce_window(self, low, lax.max, window, strides, widths)
        padded = lax.pad(self, low, [(*width, 0) for width in widths])
        return _dilated_max(padded, window, strides, dilations)

    return rule


def _dilated_max(padded: Any, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Any:
    """Return the maximum of each window; of equal values the first has the gradient.

    `lax.reduce_window` has no gradient with dilations.
    """
    sizes = [
        (n - (w - 1) * d - 1) // s + 1
        for n, w, s, d in zip(padded.shape, window, strides, dilations, strict=True)
    ]
    made = None
    for places in itertools.product(*(range(w) for w in window)):
        starts = [place * d for place, d in zip(places, dilations, strict=True)]
        ends = [start + (n - 1) * s + 1 for start, n, s in zip(starts, sizes, strides, strict=True)]
        each = lax.slice(padded, starts, ends, strides)
        made = each if made is None else jnp.where((each > made) | (each != each), each, made)
    return made


def _avg_pool(num: int) -> Rule:
    def rule(
        self: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if ceil_mode:
            raise NotImplementedError("an average pool whose size is rounded up has no rule")
        stride = list(stride) if not isinstance(stride, int) else stride
        window, strides, widths, _ = _windows(self, kernel_size, stride, padding, 1, ceil_mode, num)

        def summed(x: Any) -> Any:
            return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, strides, widths)

        if divisor_override is not None:
            return summed(self) / divisor_override
        if count_include_pad:
            return summed(self) / math.prod(window)
        return summed(self) / summed(
            jnp.ones(self.shape[-num:], self.dtype).reshape((1,) * (self.ndim - num) + self.shape[-num:])
        )

    return rule


def _adaptive_avg_pool(num: int) -> Rule:
    def rule(self: Any, output_size: Any) -> Any:
        for place, size in enumerate(_each(output_size, num)):
            self = _averaged(self, self.ndim - num + place, size)
        return self

    return rule


def _averaged(x: Any, dim: int, size: int | None) -> Any:
    """Average a dim to `size` windows, which overlap where it does not divide."""
    length = x.shape[dim]
    if size is None or size == length:
        return x
    if length % size == 0:
        return x.reshape(*x.shape[:dim], size, length // size, *x.shape[dim + 1 :]).mean(dim + 1)
    pieces = [
        lax.slice_in_dim(x, at * length // size, -(-(at + 1) * length // size), 1, dim).mean(
            dim, keepdims=True
        )
        for at in range(size)
    ]
    return jnp.concatenate(pieces, axis=dim)


MEAN, SUM = 1, 2  # PyTorch's numbers of reductions; 0 is none


def _reduced(values: Any, weights: Any, reduction: int) -> Any:
    if reduction == MEAN:
        return values.sum() / weights.sum()
    return values.sum() if reduction == SUM else values


def _negative_log(
    logs: Any, target: Any, weight: Any, reduction: int, ignore_index: int, smoothing: float = 0.0
) -> tuple[Any, Any]:
    """Return the loss of log probabilities whose classes are the last dim, and the sum of the weights."""
    counted = target != ignore_index
    at = jnp.where(counted, target, 0)
    weights = counted.astype(logs.dtype) if weight is None else jnp.where(counted, weight[at], 0)
    # A comparison with each class is fused; the gradient of a lookup would be an array of its own.
    is_class = at[..., None] == lax.broadcasted_iota(at.dtype, logs.shape, logs.ndim - 1)
    picked = -jnp.where(is_class, logs, 0).sum(-1)
    values = jnp.where(counted, picked * (1 if weight is None else weight[at]), 0)
    if smoothing:
        spread = -(logs if weight is None else logs * weight).sum(-1)
        spread = jnp.where(counted, spread, 0)
        values = (1 - smoothing) * values + smoothing / logs.shape[-1] * spread
    return _reduced(values, weights, reduction), weights.sum()


def _classes_last(self: Any) -> Any:
    return self if self.ndim == 1 else jnp.moveaxis(self, 1, -1)


def _cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    logs = jax.nn.log_softmax(_wide(_classes_last(self)), axis=-1)
    if not jnp.issubdtype(target.dtype, jnp.floating):
        return _negative_log(logs, target, weight, reduction, ignore_index, label_smoothing)[0]
    shares = _classes_last(target)
    shares = shares * (1 - label_smoothing) + label_smoothing / logs.shape[-1]
    values = -(logs * shares * (1 if weight is None else weight)).sum(-1)
    return values.mean() if reduction == MEAN else _reduced(values, None, reduction)


def _nll_loss(
    self: Any, target: Any, weight: Any = None, reduction: int = MEAN, ignore_index: int = -100
) -> Any:
    return _negative_log(_classes_last(self), target, weight, reduction, ignore_index)[0]


def _nll_loss_forward(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    return _negative_log(_classes_last(self), target, weight, reduction, ignore_index)


def _of_difference(function: Callable[..., Any]) -> Rule:
    def rule(self: Any, target: Any, reduction: int = MEAN, *more: Any, **kwargs: Any) -> Any:
        values = function(self, target, *more, **kwargs)
        return _reduced(values, jnp.ones_like(values), reduction)

    return rule


def _binary_with_logits(
    self: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> Any:
    log, log_not = jax.nn.log_sigmoid(self), jax.nn.log_sigmoid(-self)
    values = -(target * log * (1 if pos_weight is None else pos_weight) + (1 - target) * log_not)
    values = values if weight is None else values * weight
    return _reduced(values, jnp.ones_like(values), reduction)


def _smooth_l1(self: Any, target: Any, beta: float = 1.0) -> Any:
    far = magnitude(self - target)
    return jnp.where(far < beta, 0.5 * far * far / beta, far - 0.5 * beta) if beta else far


_RULES: dict[str, Rule] = {
    "mm": jnp.matmul, "bmm": jnp.matmul, "matmul": jnp.matmul, "mv": jnp.matmul, "dot": jnp.dot,
    "linear": _linear, "addmm": _addmm, "baddbmm": _addmm,
    "einsum": lambda equation, tensors, path=None: jnp.einsum(equation.replace(" ", ""), *tensors),
    "outer": jnp.outer,
    "_grouped_mm": _grouped, "scaled_dot_product_attention": _attention, "native_dropout": _dropout,
    "bernoulli": _bernoulli, "bernoulli.p": _bernoulli,
    "rand": lambda size, *, random, **_: jax.random.uniform(random, size),
    "randn": lambda size, *, random, **_: jax.random.normal(random, size),
    "rand_like": lambda self, *, random, **_: jax.random.uniform(random, self.shape),
    "randn_like": lambda self, *, random, **_: jax.random.normal(random, self.shape), "embedding": _embedding,
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "group_norm": _group_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit.no_stats": lambda input, weight, bias, training, momentum, eps:
        _batch_norm(input, weight, bias, None, None, training, momentum, eps)[:3],
    "_native_batch_norm_legit_no_training": _batch_norm_of_running, "convolution": _convolution,
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "conv_transpose1d": _conv_transpose,
    "conv_transpose2d": _conv_transpose, "conv_transpose3d": _conv_transpose, "max_pool1d": _max_pool(1),
    "max_pool2d": _max_pool(2), "max_pool3d": _max_pool(3), "avg_pool1d": _avg_pool(1),
    "avg_pool2d": _avg_pool(2), "avg_pool3d": _avg_pool(3), "adaptive_avg_pool1d": _adaptive_avg_pool(1),
    "adaptive_avg_pool2d": _adaptive_avg_pool(2), "_adaptive_avg_pool2d": _adaptive_avg_pool(2),
    "cross_entropy_loss": _cross_entropy, "nll_loss": _nll_loss, "nll_loss_nd": _nll_loss,
    "nll_loss_forward": _nll_loss_forward,
    "mse_loss": _of_difference(lambda self, target: jnp.square(self - target)),
    "l1_loss": _of_difference(lambda self, target: magnitude(self - target)),
    "smooth_l1_loss": _of_difference(_smooth_l1),
    "binary_cross_entropy_with_logits": _binary_with_logits,
}  # fmt: skip
LAYERS = {f"aten::{name}": rule for name, rule in _RULES.items()}
LAYERS["transformers::grouped_mm_fallback"] = _grouped
RANDOM = frozenset(
    f"aten::{name}" for name in ("native_dropout", "bernoulli", "rand", "randn", "rand_like", "randn_like")
)
