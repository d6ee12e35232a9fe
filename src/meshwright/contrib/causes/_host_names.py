"""Tell what the host does from the names of a trace's events: compiling, reading data, copying, waiting."""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path

# By kind of `HOST_KINDS`, what the names of its events hold; the first that is found counts. Names of the
# profiler's own events, of functions of jax and numpy ("$pjit.py:1082 _resolve_and_lower"), and of built-ins.
JAX_NAMES = {
    "compile": r"backend_compile|Client::Compile|CompileAndLoad|XlaCompile|_resolve_and_lower$"
    r"|lower_sharding_computation|_cached_lowering|compile_or_get_cached",
    "trace": r"trace_to_jaxpr|_trace_for_jit|_infer_params$",
    "callback": r"callback_impl|_callback_wrapper|_wrapped_callback|python_callback|pure_callback_impl",
    "transfer": r"^\$numpy (array|asarray|copy|ascontiguousarray)|\b_value$|__array__|__float__|__int__"
    r"|device_get|device_put|DevicePut|DevicePutWithSharding|ToLiteral|CopyToHost|copy_to_host"
    r"|TransferFrom|TransferTo|H2D|D2H|BufferFromHost",
    "wait": r"block_until_ready|Buffer::Await|BlockHostUntilReady",
    "collect": r"gc collect|CollectGarbage",
    "launch": r"^PjitFunction|Executable::Execute|apply_primitive|ExecuteSharded|cache_miss$",
}
# What a function of the user's, a built-in or a module of a library is called that reads data, or saves.
USER_NAMES = {
    "data": r"(?:^|_|\b)(next|__next__|data|dataloader|loader|load_batch|batch(?:es)?|get_batch|fetch|collate"
    r"|tokeni[sz]e|prefetch|queue|__getitem__|read_batch|sample_batch|input|inputs)(?:$|_|\b)",
    "save": r"(?:^|_|\b)(save|checkpoint|evaluate|eval|validate|validation|log|logging|report|dump|write"
    r"|write_summary|add_scalar)(?:$|_|\b)",
}
FRAME = re.compile(r"\$(?P<place>[^ ]+\.py:\d+) (?P<function>.+)")
SLEEP = "$time sleep"


@functools.lru_cache(maxsize=2**16)
def kind_of_name(name: str) -> str | None:
    """Return the kind of an event of the profiler, of jax or of numpy; None if its name tells none.

    >>> kind_of_name("PjRtCpuClient::Compile"), kind_of_name("$numpy asarray")
    ('compile', 'transfer')
    """
    return next((kind for kind, pattern in JAX_NAMES.items() if re.search(pattern, name)), None)


@functools.lru_cache(maxsize=2**16)
def kind_of_function(name: str) -> str:
    """Return the kind of a function of the user's: data, save, or python.

    >>> kind_of_function("next_batch"), kind_of_function("evaluate"), kind_of_function("main")
    ('data', 'save', 'python')
    """
    return next((kind for kind, pattern in USER_NAMES.items() if re.search(pattern, name)), "python")


@functools.lru_cache(maxsize=2**16)
def is_of_a_library(place: str) -> bool:
    """Return whether the file of "file.py:12" is one of Python's or jax's own; a trace has no folders."""
    return place.partition(":")[0] in _library_files()


@functools.cache
def _library_files() -> frozenset[str]:
    import importlib.util

    folders = [Path(sysconfig.get_paths()["stdlib"])]
    names = {file.name for folder in folders for file in folder.glob("*.py")}
    for package in ("jax", "jaxlib", "numpy", "optax", "flax"):
        found = importlib.util.find_spec(package)
        for folder in found.submodule_search_locations or () if found is not None else ():
            names.update(file.name for file in Path(folder).rglob("*.py"))
    return frozenset(names - {"__main__.py", "train.py", "main.py"})
