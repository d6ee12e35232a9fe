"""Follow CUDA's rules of autocast for fake tensors that live on a CPU.

Under `torch.autocast` each device has lists of operators: those that run in the lower precision, in fp32, or
in the widest format of their operands (pytorch/pytorch, aten/src/ATen/autocast_mode.h). A GPU runs powers,
norms, sums and losses in fp32, a CPU most of them in the format in which they come. Where the lists differ,
the CPU's dispatch key gets kernels that do what CUDA's do, until the block ends. Code that names the device
"cuda" itself then gets the CPU's autocast, since its tensors are there.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

# Operators of CUDA's lists, with their overloads. Any other one that PyTorch casts on CUDA runs in fp32.
LOWER = frozenset(
    """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
_scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()  # noqa: SIM905  quotes less
)
WITH_FORMAT = frozenset(  # they have an argument for the result's format, which becomes fp32 if none is given
    """
prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
sum.dim_IntList sum.dim_DimnameList
""".split()  # noqa: SIM905
)
# They call the overload that takes a format.
APPENDED = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}
WIDEST = frozenset(
    """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()  # noqa: SIM905
)
REFUSED = "binary_cross_entropy"
CHANGED = frozenset(("prod", "prod.dim_int", "prod.dim_Dimname", "grid_sampler", REFUSED))  # both cast them
CPU, CUDA = "cpu", "cuda"

Casts = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by the original's id: it, and its copy
Function = Callable[..., Any]


@contextlib.contextmanager
def cudas_autocast() -> Iterator[None]:
    """Let autocast on the CPU cast what it casts on CUDA, in the block."""
    casts: Casts = {}
    library = torch.library.Library("aten", "IMPL")
    clear = torch.clear_autocast_cache

    def forget() -> None:
        casts.clear()
        clear()

    kernels = {
        **{name: _kernel(name, operator(name), casts) for name in _cast_on(CUDA) - (_cast_on(CPU) - CHANGED)},
        **dict.fromkeys(_cast_on(CPU) - _cast_on(CUDA), torch.library.fallthrough_kernel),
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that it is replaced
            for name, kernel in kernels.items():
                library.impl(name, kernel, "AutocastCPU", allow_override=True)
        with mock.patch.object(torch, "clear_autocast_cache", forget), _cuda_is_here():
            yield
    finally:
        library._destroy()
        casts.clear()


def under_autocast(name: str, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in place of an operator, with CUDA's autocast rules if autocast is on."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    device = next((tensor.device.type for tensor in tensors), CPU)
    if name in _cast_on(CUDA) and torch.is_autocast_enabled(device):
        return _kernel(name, function, {}, device)(*args, **kwargs)
    return function(*args, **kwargs)


def operator(name: str) -> Any:
    """Return an operator of ATen by its name with its overload: "pow.Tensor_Scalar", "linear"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@functools.cache
def _cast_on(device: str) -> frozenset[str]:
    """Return the operators for which PyTorch itself has a kernel under autocast on a device."""
    has_kernel, key = torch._C._dispatch_has_kernel_for_dispatch_key, f"Autocast{device.upper()}"
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(name.removeprefix("aten::") for name in names if has_kernel(name, key))


def _kernel(name: str, function: Function, casts: Casts, device: str = CPU) -> Function:
    """Return an operator's function with the casts of CUDA's autocast around it."""
    prepare = _refuse if name == REFUSED else functools.partial(_cast_all, _format_rule(name), casts, device)
    if name in WITH_FORMAT:
        arguments = [argument.name for argument in operator(name)._schema.arguments]
        prepare = functools.partial(_with_format, arguments.index("dtype"))
    elif name in APPENDED:
        function, prepare = operator(APPENDED[name]), _with_format_appended

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # PyTorch's own kernels under autocast are C++, which calls no mode of Python's.
        with torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            args, kwargs = prepare(args, kwargs)
            return function(*args, **kwargs)

    return kernel


def _format_rule(name: str) -> Callable[[Any, torch.dtype], torch.dtype]:
    """Return the rule that finds an operator's format from its operands and the lower one."""
    if name in LOWER:
        return lambda operands, lower: lower
    return _widest if name in WIDEST else lambda operands, lower: torch.float32


def _widest(operands: Any, lower: torch.dtype) -> torch.dtype:
    found = {leaf.dtype for leaf in pytree.tree_leaves(operands) if is_cast(leaf)}
    return torch.float32 if torch.float32 in found else lower


def is_cast(value: Any) -> bool:
    """Return True for a tensor that autocast may cast: of floating point, but not fp64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast_all(
    rule: Callable[[Any, torch.dtype], torch.dtype], casts: Casts, device: str, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    lower = torch.get_autocast_dtype(device)
    dtype = rule(args, lower)

    def cast(leaf: Any) -> Any:
        if not is_cast(leaf) or leaf.dtype == dtype:
            return leaf
        is_weight = dtype == lower and leaf.dtype == torch.float32 and leaf.requires_grad and leaf.is_leaf
        if not is_weight or leaf._is_view() or not torch.is_autocast_cache_enabled():
            return leaf.to(dtype)
        if id(leaf) not in casts:
            casts[id(leaf)] = (leaf, leaf.to(dtype))
        return casts[id(leaf)][1]

    return pytree.tree_map(cast, (args, kwargs))


def _with_format(place: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Add fp32 to the arguments if no format is given; `place` is that of the format among them."""
    given = args[place] if len(args) > place else kwargs.get("dtype")
    if given is not None or not is_cast(args[0]):
        return args, kwargs
    return args[:place], {**kwargs, "dtype": torch.float32}


def _with_format_appended(args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = torch.float32 if is_cast(args[0]) else args[0].dtype
    return (*args, False) if len(args) == 3 else args, {**kwargs, "dtype": dtype}  # `keepdim` has no default


def _refuse(args: Any, kwargs: Any) -> tuple[Any, Any]:
    raise RuntimeError(
        "autocast on a GPU refuses binary_cross_entropy and BCELoss, since small numbers would vanish; "
        "binary_cross_entropy_with_logits and BCEWithLogitsLoss take their place"
    )


@contextlib.contextmanager
def _cuda_is_here() -> Iterator[None]:
    """Redirect autocast for "cuda" to the CPU, where the tensors are."""
    kind, modes = torch.autocast, torch.amp.autocast_mode
    make, cast = kind.__init__, modes._cast
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def here(device_type: Any) -> Any:
        return CPU if device_type in (None, CUDA) else device_type

    def dtype_here(device_type: str) -> torch.dtype:
        return dtype_of(here(device_type) if is_enabled(CPU) else device_type)

    def made(self: Any, device_type: str, dtype: torch.dtype | None = None, *how: Any, **named: Any) -> None:
        make(self, here(device_type), dtype or dtype_here(device_type), *how, **named)

    def cast_here(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, here(device_type), dtype)

    with (
        mock.patch.object(kind, "__init__", made),
        mock.patch.object(modes, "_cast", cast_here),
        mock.patch.multiple(
            torch,
            is_autocast_enabled=lambda device_type=None: is_enabled(here(device_type)),
            get_autocast_dtype=dtype_here,
            get_autocast_gpu_dtype=lambda: dtype_here(CUDA),
        ),
    ):
        yield
