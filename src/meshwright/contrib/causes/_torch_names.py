"""Tell from the names in a trace of torch.profiler what a device and the host do."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from typing import Any

from meshwright.contrib.calibration import class_of_kernel

from ._recorded import UNKNOWN

MEMORY_BOUND = "memory-bound"
FORMATS = {  # as `Input type` and the arguments of collectives spell them
    "float": "fp32", "double": "fp64", "c10::bfloat16": "bf16", "bfloat16": "bf16", "c10::half": "fp16",
    "half": "fp16", "c10::float8_e4m3fn": "fp8_e4m3", "c10::float8_e5m2": "fp8_e5m2",
}  # fmt: skip
BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::bfloat16": 2, "bfloat16": 2,
         "c10::half": 2, "half": 2, "short": 2}  # fmt: skip
# Operations by the class of their kernel, where the kernel's own name tells none.
OPERATIONS = {
    "matmul": r"addmm|baddbmm|bmm|mm|matmul|linear|addmv|mv|dot|scaled_mm|grouped_mm|mkldnn_linear\w*"
    r"|lstm|gru",
    "attention": r"\w*attention\w*|flash_attn\w*|fmha\w*|_flash\w*|flex_attention\w*",
    "convolution": r"\w*convolution\w*|conv[123]d|cudnn_conv\w*|miopen_conv\w*|_conv\w*",
}
MESSAGES = {
    "all-gather": r"all_?gather", "reduce-scatter": r"reduce_?scatter", "all-reduce": r"all_?reduce",
    "all-to-all": r"all_?to_?all", "broadcast": r"broadcast", "collective-permute": r"send|recv|permute",
}  # fmt: skip
BACKWARD_CALL = re.compile(r"\brun_backward\b|_engine_run_backward")  # computes gradients, without Python
MESSAGE = re.compile(r"(?:nccl|rccl|gloo|mpi|ucc|xccl|hccl):(\w+)")
# Kernels that are messages without NCCL: NVLink's multicast, DeepEP, vLLM's own.
OTHER_MESSAGES = re.compile(
    r"multimem_\w+|(one|two)_shot_\w+|cross_device_reduce|(deep_ep|::ep)::\w+|nvshmem\w*"
)
LITTLE_ARITHMETIC = re.compile(
    r"at::native::|^memset|multi_tensor_apply|cub::|thrust::|norm|softmax|rotary|elementwise|act_and_mul"
    r"|embedding|dropout|cross_entropy|adam|transpose|permute|scan|sort|reduce|copy|fill|cast"
)
COPIES = (("copy-to-device", ("htod", "hosttodevice")), ("copy-to-host", ("dtoh", "devicetohost")),
          ("copy", ("",)))  # fmt: skip
# No operation of these does work on a CPU: they make views, or ask for memory.
VIEWS = frozenset(
    """alias as_strided as_strided_ chunk contiguous detach detach_ empty empty_like empty_strided expand
    expand_as flatten is_same_size lift_fresh movedim narrow new_empty new_empty_strided numpy_T
    permute reshape resize_ resolve_conj resolve_neg result_type select set_ slice split
    split_with_sizes squeeze squeeze_ t to transpose transpose_ type_as unbind unflatten unsqueeze
    unsqueeze_ view view_as _reshape_alias _unsafe_view
    """.split()  # noqa: SIM905  quotes less
)
WAITS = ("item", "_local_scalar_dense", "is_nonzero", "equal")  # operations that give the host a number
TEMPLATES = ("triton_tem", "triton_mm", "triton_bmm", "triton_addmm", "triton_mm_plus")
ENGINE = "autograd::engine::evaluate_function: "
BACKWARD = re.compile(r"([A-Z]\w*Backward\d*|torch::autograd::AccumulateGrad)")  # the nodes of autograd
NO_WORK = ("autograd::", "torch::", "c10d::", "profiler::", "_c10d_functional::wait", "record_param_comms")
OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#(.+)")
STEP = re.compile(r"ProfilerStep[#*]\d+")
COMPILED_GRAPH = "## Call CompiledFxGraph"
# By kind of `HOST_KINDS`, the names of annotations and operations.
ANNOTATIONS = {
    "data": r"enumerate\(DataLoader\)|DataLoader|dataloader|data_?load|next_batch|get_batch|fetch_data",
    "compile": r"dynamo_timed|compile_inner|compile_fx|CachingAutotuner|autotun|async_compile"
    r"|Lazy Function Load|ModuleLoad|cuda\w*GraphInstantiate|hipModule",
    "save": r"(?i)checkpoint.*(save|writ)|(save|writ)\w*.*checkpoint|save_state|^##? ?eval"
    r"|\bevaluat|\bvalidat",
    "collect": r"^(Python )?GC\b|gc\.collect",
}
# By kind, the functions of Python: "file(line): function", or a built-in one.
FUNCTIONS = {
    "data": r"torch/utils/data/(dataloader|_utils/\w+)\.py\(\d+\): (__next__|_next_data|fetch)"
    r"|datasets/\w+\.py\(\d+\): __(next|iter)__",
    "compile": r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py"
    r"|torch/_inductor/compile_fx\.py|torch/_inductor/(async_compile|codecache|graph)\.py|triton/compiler/"
    r"|torch/utils/cpp_extension\.py",
    "save": r"torch/serialization\.py\(\d+\): save$"
    r"|torch/distributed/checkpoint/\w+\.py\(\d+\): (async_)?save|safetensors/torch\.py\(\d+\): save",
    "collect": r"<built-in function collect>",
    "wait": r"<built-in (function|method) (_?cuda_synchronize|synchronize|barrier|wait|item)\b"
    r"|torch/cuda/__init__\.py\(\d+\): synchronize|<built-in method acquire of _thread\.lock",
}
SYNCHRONIZE = re.compile(r"(cuda|hip|cu)(Stream|Device|Event|Ctx)\w*Synchronize")
LAUNCH = re.compile(r"(cuda|hip|cu)\w*(Launch|ExtModule)\w*|\w*launch\w*", re.IGNORECASE)
COPY_CALL = re.compile(r"(cuda|hip|cu)Memcpy\w*")
FRAME = re.compile(r"(?P<file>[^()]+)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
MODULE = "nn.Module: "
LIBRARIES = ("torch/", "triton/", "numpy/", "<", "site-packages/torch/")


def bare(name: str) -> str:
    """Return the name of an operation without its namespace."""
    return name.rpartition("::")[2]


def _first(table: dict[str, str], name: str, *, whole: bool = False) -> str | None:
    find = re.fullmatch if whole else re.search
    return next((kind for kind, pattern in table.items() if find(pattern, name)), None)


@functools.lru_cache(maxsize=2**16)
def message_kind(name: str) -> str | None:
    """Return the kind of a collective by its name.

    >>> message_kind("_allgather_base"), message_kind("all_reduce"), message_kind("send")
    ('all-gather', 'all-reduce', 'collective-permute')
    """
    small = name.lower()
    if OTHER_MESSAGES.search(small) and "::ep::" in small.replace("deep_ep", "::ep"):
        return "all-to-all"
    return _first(MESSAGES, small) or ("all-reduce" if "cross_device_reduce" in small else None)


@functools.lru_cache(maxsize=2**16)
def operation_kind(name: str) -> str:
    """Return the class of work of an operation of PyTorch.

    >>> operation_kind("aten::addmm"), operation_kind("aten::gelu_backward"), operation_kind("mine::sort")
    ('matmul', 'memory-bound', 'unknown')
    """
    stem = re.sub(r"^_+|_+$", "", bare(name).removesuffix("_backward"))
    kind = _first(OPERATIONS, stem, whole=True)
    known = name.startswith(("aten::", "inductor::", "triton_"))
    return kind or (MEMORY_BOUND if known or "_fused_" in name else UNKNOWN)


@functools.lru_cache(maxsize=2**16)
def kernel_kind(name: str, operation: str) -> str:
    """Return the class of a kernel by its name, or else by the operation that launched it."""
    small = name.lower()
    if small.startswith("triton_"):
        is_product = small.startswith(TEMPLATES) and re.search(r"_(add|badd)?b?mm(_|$)", small)
        attends = "flex" in small or "attention" in small
        return "matmul" if is_product else "attention" if attends else MEMORY_BOUND
    if (kind := class_of_kernel(name)) is not None:
        asked = operation_kind(operation) if kind == "matmul" and operation else kind
        return "convolution" if asked == "convolution" else kind  # cuDNN has convolutions as products
    if LITTLE_ARITHMETIC.search(small):
        return MEMORY_BOUND
    return operation_kind(operation) if operation else UNKNOWN


def copy_kind(name: str) -> str:
    """Return where a copy goes, by its name in the trace: "Memcpy HtoD (Pageable -> Device)"."""
    small = name.lower().replace(" ", "")
    return next(kind for kind, words in COPIES if any(word in small for word in words))


@functools.lru_cache(maxsize=2**16)
def annotation_kind(name: str) -> str | None:
    """Return what the host does inside of an annotation; None if its name tells nothing.

    >>> annotation_kind("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    'data'
    """
    return _first(ANNOTATIONS, name)


@functools.lru_cache(maxsize=2**17)
def function_kind(name: str) -> str | None:
    """Return what the host does inside of a function of Python; None if its name tells nothing."""
    return _first(FUNCTIONS, name)


@functools.lru_cache(maxsize=2**17)
def users_line(name: str) -> str | None:
    """Return file and line of a function of the user's; None for PyTorch's own and the standard library's.

    A library's model counts as the user's. The line is where the function begins: the profiler says no other.

    >>> users_line("/home/me/train.py(25): main"), users_line("torch/nn/functional.py(9): gelu")
    ('train.py:25', None)
    """
    frame = FRAME.fullmatch(name)
    if frame is None or frame["file"].startswith(LIBRARIES) or "/torch/" in frame["file"]:
        return None
    file = frame["file"]
    first = file.partition("/")[0].removesuffix(".py")
    if not file.startswith("/") and first in sys.stdlib_module_names:
        return None
    if re.search(r"/python3\.\d+/(?!site-packages|dist-packages)", file):
        return None
    return f"{file.rpartition('/')[2]}:{frame['line']}"


def sizes(dims: Any, place: int) -> tuple[int, ...] | None:
    """Return the shape of one operand in `Input Dims`; None if it is none."""
    shape = dims[place] if isinstance(dims, list) and place < len(dims) else None
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        return None
    return tuple(shape)


def product_flops(name: str, dims: Any) -> float | None:
    """Return the FLOPs of a matrix product by the shapes of its operands; None for another operation."""
    places = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addmm_": (1, 2)}
    if bare(name) not in places:
        return None
    left, right = (sizes(dims, place) for place in places[bare(name)])
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    rows = 1.0
    for size in left[:-1]:
        rows *= size
    return 2.0 * rows * left[-1] * right[-1]


def elements_bytes(shape: Sequence[int] | None, format_text: Any) -> float | None:
    """Return the bytes of an array by its shape and the name of its format; None if either is not known."""
    width = BYTES.get(str(format_text).lower())
    if shape is None or width is None:
        return None
    total = float(width)
    for size in shape:
        total *= size
    return total
