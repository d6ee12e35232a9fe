"""Compile the Pallas kernels of a program alone, while XLA optimises the whole of it.

A kernel for a GPU may still be refused when machine code is made of it: it may need more shared memory than
there is. A weighing would have to wait for the machine code of the whole program (`_optimised`), of which few
kernels are such. If each of them compiles alone, for one device, nothing else can fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshwright.compiler import PALLAS

from ._deviceless import devices_of_kind
from ._optimised import put_assembler


class KernelsAlone:
    """The Pallas kernels of a traced program, which begin to compile at once in a thread of their own.

    Args:
        program: the traced program, in which shapes inside `shard_map` are those of a device.
        device: of the target.
        options: of the compiler, for the program.
        toolkit: a folder to make, for the stand-in of the assembler: that of the program may be held up.
    """

    target = "__gpu$xla.gpu.triton"
    """What XLA calls for a Pallas kernel that Triton compiles."""

    def __init__(self, program: Any, device: Any, options: Mapping[str, Any], toolkit: Path) -> None:
        self._calls = {_key(call): call for call in _calls_in(program, set())}
        self._job = None
        if self._calls:
            put_assembler(toolkit)
            own = {key: value for key, value in options.items() if not key.startswith("xla_dump")}
            own["xla_gpu_cuda_data_dir"] = str(toolkit)
            self._job = ThreadPoolExecutor(1).submit(self._all_compile, device, own)

    def has_ended(self) -> bool:
        """Return whether nothing compiles any more."""
        return self._job is None or self._job.done()

    def compiled(self) -> bool:
        """Return whether there are kernels, and all of them compiled; wait for that."""
        return self._job is not None and self._job.result()

    def _all_compile(self, device: Any, options: dict[str, Any]) -> bool:
        return all(_compiles(call, device, options) for call in self._calls.values())


def _calls_in(program: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the calls of Pallas kernels in a program and in those that it runs, each read once."""
    seen.add(id(program))
    for call in program.eqns:
        if call.primitive.name == PALLAS:
            yield call
            continue
        for value in call.params.values():
            for each in value if isinstance(value, list | tuple) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns") and id(inner) not in seen:
                    yield from _calls_in(inner, seen)


def _key(call: Any) -> tuple[str, ...]:
    """Return what tells unlike kernels apart: the text of what they do, and of what they are given."""
    return *(str(each.aval) for each in call.invars), *(f"{key}={call.params[key]}" for key in call.params)


def _compiles(call: Any, device: Any, options: dict[str, Any]) -> bool:
    """Return whether a kernel alone compiles to machine code; False also if it cannot stand alone."""
    import jax

    place = jax.sharding.SingleDeviceSharding(device)
    given = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype, sharding=place) for each in call.invars]

    def run(*arrays: Any) -> Any:
        return call.primitive.bind(*arrays, **call.params)

    try:
        with devices_of_kind(device.device_kind, "cuda"):  # of this thread alone
            jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
    except Exception:  # of any kind: the program's own compilation then says it
        return False
    return True
