"""Weigh what may need libraries of NVIDIA, with whatever is installed; `install.py --equal` compares that.

Run: PYTHON benchmarks/install_cases.py FOLDER [WORDS ...]    (only cases whose names have one of the words)
Cases: presets for a chip of each generation, in bf16 and fp8, and functions of JAX that a library computes on
a card. Writes FOLDER/CASE.json, or the words of its refusal.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax import random as keys
from jax.experimental import sparse

import meshwright as mw

warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.12 announces the end of its Triton kernels
from jax.experimental.pallas.ops.gpu import attention as triton

CHIPS = ("T4", "A100-80GB", "A10", "L4", "H100", "B200", "B300", "RTX-5090")
EIGHT_BITS = ("L4", "H100", "B200", "B300", "RTX-5090")
NHWC = ("NHWC", "HWIO", "NHWC")


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array's shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


def definite(a: Any) -> Any:
    """A positive definite matrix."""
    return a @ a.T + 1e3 * jnp.eye(len(a))


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the sum of a function's result, by its first two arguments."""
    return jax.grad(lambda *given: function(*given).astype(jnp.float32).sum(), (0, 1))


def attend(how: str) -> Callable[..., Any]:
    """Attention by cuDNN or in plain JAX, and its gradients."""
    return gradient(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how))


def printed(a: Any) -> Any:
    """Call the host."""
    jax.debug.print("sum {}", a.sum())
    return a + 1


A, HEADS = of(512, 512), (of(2, 1024, 8, 64, dtype=jnp.bfloat16),) * 3
HALF = (of(1, 1024, 4, 64, dtype=jnp.float16),) * 3
IMAGES = (of(8, 64, 64, 32, dtype=jnp.bfloat16), of(3, 3, 32, 64, dtype=jnp.bfloat16))
FP8, EXPERTS = jnp.float8_e4m3fn, of(8, 512, 256, dtype=jnp.bfloat16)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "fft": (lambda a: jnp.fft.irfft2(jnp.fft.rfft2(a) * 2), (A,)),
    "fft_complex": (lambda a: jnp.abs(jnp.fft.fft(a)).sum(), (A,)),
    "eigh": (lambda a: jnp.linalg.eigh(definite(a)), (A,)),
    "eig": (jnp.linalg.eig, (A,)),
    "cholesky": (lambda a: jnp.linalg.cholesky(definite(a)), (A,)),
    "svd": (jnp.linalg.svd, (A,)),
    "qr": (jnp.linalg.qr, (A,)),
    "solve": (jnp.linalg.solve, (A, A)),
    "triangular": (jax.scipy.linalg.solve_triangular, (A, A)),
    "tridiagonal": (lambda a, d: lax.linalg.tridiagonal_solve(d, d, d, a), (A, of(512))),
    "expm": (jax.scipy.linalg.expm, (A,)),
    "convolution": (
        gradient(lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", None, None, NHWC)),
        IMAGES,
    ),
    "attention_cudnn": (attend("cudnn"), HEADS),
    "attention_xla": (attend("xla"), HEADS),
    "triton": (lambda q, k, v: triton.mha(q, k, v, segment_ids=None, causal=True), HALF),
    "sort": (lambda a: (jnp.sort(a), lax.top_k(a, 16), jnp.cumsum(a)), (of(2**20),)),
    "random": (
        lambda k: (keys.normal(k, (1024, 1024)), keys.gamma(k, 2.0, (100,))),
        (of(2, dtype=jnp.uint32),),
    ),
    "product_fp8": (
        lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32),
        (of(1024, 1024, dtype=FP8),) * 2,
    ),
    "product_ragged": (lax.ragged_dot, (of(1024, 512, dtype=jnp.bfloat16), EXPERTS, of(8, dtype=jnp.int32))),
    "product_sparse": (
        lambda a, d, i: sparse.BCOO((d, i), shape=(512, 512)) @ a,
        (A, of(4096), of(4096, 2, dtype=jnp.int32)),
    ),
    "print": (printed, (A,)),
}


def cases() -> dict[str, Callable[[], Any]]:
    """Each case's weighing, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for name, (function, arguments) in FUNCTIONS.items():
        found[f"{name}@H100"] = lambda f=function, a=arguments: mw.weigh(mw.jax_step(f, *a), on="1xH100")
    for chip in CHIPS:
        for preset, fleet in (
            ("gpt2-124m", f"1x{chip}"),
            ("llama3-8b", f"8x{chip}"),
            ("resnet18-fashion", f"1x{chip}"),
        ):
            found[f"{preset}@{fleet}"] = lambda p=preset, f=fleet: mw.weigh(p, on=f)
    for chip in EIGHT_BITS:
        found[f"llama-1b-fp8@8x{chip}"] = lambda c=chip: mw.weigh(
            "llama-1b", on=f"8x{c}", overrides={"precision": "fp8"}
        )
    return found


def main() -> None:
    """Weigh the cases that are asked for and not there yet."""
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, weigh in cases().items():
        file = folder / f"{name}.json"
        if file.exists() or not any(word in name for word in words or [""]):
            continue
        try:
            file.write_text(weigh().to_json())
        except mw.MeshwrightError as refused:
            file.write_text(json.dumps({"refused": refused.message}))
        print(name, flush=True)


if __name__ == "__main__":
    main()
