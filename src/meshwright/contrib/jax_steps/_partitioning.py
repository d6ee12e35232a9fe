"""Partition a user's `custom_partitioning` calls: the compiler asks the process that lowered the program.

JAX lowers such a call (cuDNN's attention is one) to a custom call that carries the address of a Python
object. The compiler then asks JAX, while it partitions, for the program of one device. The worker that
compiles has no such object. Its questions therefore go back to the user's process, which answers them with
JAX's own rule, as if the compiler ran there.

A question is a file in the worker's folder, and so is its answer. Each is JSON: shapes as XLA prints them,
shardings as base64 of XLA's `OpSharding`, the program of one device as base64 of StableHLO bytecode.

Only the question for the partitioned program exists: Shardy, JAX's partitioner since 0.7, reads shardings
from the rule in the text.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax._src import custom_partitioning as jaxs
from jax._src import xla_bridge
from jaxlib import xla_client

from meshwright.compiler import ANSWER, QUESTION

TARGET = (
    "MeshwrightPartitioning"  # JAX's own target has a partitioner, which knows this process's objects only
)
_CALL = re.compile(r'custom_call @CustomSPMDPartitioning\((?:[^{"]*)\) \{[^\n]*?backend_config = "(\d+)"')
POLL_SECONDS = 0.005
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def renamed(text: str) -> tuple[str, list[str]]:
    """Return StableHLO text whose custom partitioning is ours, and the addresses that its calls carried.

    In the text an address becomes its place in the list, so that the same program is the same text again.
    """
    addresses = list(dict.fromkeys(_CALL.findall(text)))

    def ours(match: re.Match[str]) -> str:
        found = match[0].replace("@CustomSPMDPartitioning", f"@{TARGET}")
        return found.removesuffix(f'"{match[1]}"') + f'"{addresses.index(match[1])}"'

    return _CALL.sub(ours, text), addresses


def rules_text(jaxpr: Any) -> str:
    """Serialise a program's partitioning rules, which its own text omits."""
    found: list[str] = []
    for eqn in equations(jaxpr):
        if eqn.primitive is jaxs.custom_partitioning_p:
            rule, called = eqn.params["partition"], _ADDRESS.sub("", str(eqn.params["call"]))
            code = getattr(rule, "__code__", None)
            found.append(f"{called} {rule.__module__}.{rule.__qualname__}")
            if code is not None:
                found.append(f"{code.co_code.hex()} {_ADDRESS.sub('', str(code.co_consts))}")
    return "\n".join(found)


def equations(jaxpr: Any) -> Iterator[Any]:
    from jax._src.core import subjaxprs

    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from equations(inner)


def answers_of(addresses: list[str], lowered: Any) -> Callable[[str], str]:
    """Return the function that answers a worker's questions.

    Args:
        addresses: from `renamed`.
        lowered: the `jax.stages.Lowered` of the text, which keeps the objects at these addresses alive.
    """

    def answer(question: str) -> str:
        assert lowered is not None, "it keeps the objects alive"
        asked = json.loads(question)
        try:
            program, arguments, result = jaxs._custom_partitioning_partition(
                [xla_client.Shape(text) for text in asked["shapes"]],
                [_sharding(text) for text in asked["shardings"]],
                xla_client.Shape(asked["result_shape"]),
                _sharding(asked["result_sharding"]),
                addresses[asked["call"]].encode(),
            )
        except Exception as failed:  # the user's rule may raise anything: the compiler's error quotes it
            return json.dumps({"error": f"{type(failed).__name__}: {failed}"})
        return json.dumps(
            {
                "program": base64.b64encode(program).decode(),
                "shardings": [_text(each) for each in arguments],
                "result_sharding": _text(result),
            }
        )

    return answer


def ask_in(folder: Path) -> None:
    """Let the compiler of this process ask through files in a folder. Call it before a plugin is loaded.

    Each question has a file name of its own; the answer is there when a file with its name and `ANSWER` is.
    """
    numbers = itertools.count()

    def partition(
        shapes: list[Any], shardings: list[Any], result_shape: Any, result_sharding: Any, call: bytes
    ) -> tuple[bytes, list[Any], Any]:
        question = {
            "shapes": [str(each) for each in shapes],
            "shardings": [_text(each) for each in shardings],
            "result_shape": str(result_shape),
            "result_sharding": _text(result_sharding),
            "call": int(call),
        }
        name = f"{QUESTION}{next(numbers)}"
        (folder / "part").write_text(json.dumps(question))
        (folder / "part").rename(folder / name)
        while not (folder / (name + ANSWER)).exists():  # the caller ends this process if it gives up
            time.sleep(POLL_SECONDS)
        answer = json.loads((folder / (name + ANSWER)).read_text())
        if "error" in answer:
            raise ValueError(f"the partitioning rule failed: {answer['error']}")
        program = base64.b64decode(answer["program"])
        return (
            program,
            [_sharding(text) for text in answer["shardings"]],
            _sharding(answer["result_sharding"]),
        )

    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name=TARGET,
        prop_user_sharding=lambda sharding, shape, call: sharding,
        partition=partition,
        infer_sharding_from_operands=_not_asked,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def _not_asked(*arguments: Any) -> Any:
    raise NotImplementedError("custom partitioning without Shardy: JAX's partitioner of before 0.7")


def _text(sharding: Any) -> str:
    return base64.b64encode(sharding.to_proto().SerializeToString()).decode()


def _sharding(text: str) -> Any:
    proto = xla_client.OpSharding()
    proto.ParseFromString(base64.b64decode(text))
    return xla_client.HloSharding.from_proto(proto)
