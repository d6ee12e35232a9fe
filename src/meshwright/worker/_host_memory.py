"""Name the arguments and results of a lowered step that lie in the hosts' memory.

Described devices list no memories, and JAX then names none in the program. XLA would guess where the state
lies, from the copies within the step and from donation, and compile a program that no device runs: reads of
the host's memory inside the update, and a second copy of the layers there. For attached devices JAX names
the memory of every argument and result, and here the same is done for described ones.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jaxlib.mlir import ir

from meshwright.compiler import Request

KIND = "mhlo.memory_kind"  # the attribute in which XLA's runtimes for GPUs and TPUs look for it


def is_on_host(path: str, shape: tuple[int, ...], request: Request) -> bool:
    """Return True if a step of ours keeps an array of its state in host memory.

    A CPU's device memory is the host's memory.
    """
    offload = (request.config or {}).get("offload", "none")
    if offload == "none":
        return False
    from meshwright.config import OFFLOADED, holds_layers

    offloaded = OFFLOADED[offload]
    parts = ("state['optimizer']", "state['master']") if "moments" in offloaded else ()
    group = re.match(r"state\['parameters'\]\['(\w+)'\]", path)
    is_layers = "parameters" in offloaded and group is not None and holds_layers(group[1])
    return request.platform != "cpu" and bool(shape) and (is_layers or path.startswith(parts))


def name_memories(request: Request, traced: Any, lowered: Any) -> None:
    """Name in a lowered step of ours the memory of each argument and result, if any is the host's."""
    names, avals = traced.jaxpr.jaxpr.debug_info.arg_names, traced.jaxpr.in_avals
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])
    arguments = [is_on_host(str(names[place]), avals[place].shape, request) for place in kept]
    if not any(arguments):
        return
    results = [
        is_on_host(f"state{jax.tree_util.keystr(path[1:])}" * (path[0].idx == 0), info.shape, request)
        for path, info in jax.tree_util.tree_flatten_with_path(lowered.out_info)[0]
    ]
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        main: Any = ir.SymbolTable(module.operation)["main"]
        main.arg_attrs = _named(main.arg_attrs, arguments)
        main.result_attrs = _named(main.result_attrs, results)


def _named(attributes: Any, on_host: list[bool]) -> ir.ArrayAttr:
    """Return the attributes of arguments or results with the memory of each."""
    named: list[ir.DictAttr] = []
    for known, is_hosts in zip(attributes, on_host, strict=True):
        kind = ir.StringAttr.get("pinned_host" if is_hosts else "device")
        named.append(ir.DictAttr.get({**{each.name: each.attr for each in known}, KIND: kind}))
    return ir.ArrayAttr.get(named)
