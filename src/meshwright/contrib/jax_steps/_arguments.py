"""Return the paths and roles of a call's arguments: "state.opt_state[0].mu['w']" is state of the optimizer.

The paths are those that JAX writes into the program. A role follows from a name in the path, or from the
class that Flax NNX or Equinox gives a value.
Imports jax: only a process that traces may import this module.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def plain(step: Any) -> Any:
    """Return the function that a wrapper wraps."""
    return getattr(step, "__wrapped__", step)


def argument_paths(step: Any, arguments: Any, keywords: Any) -> list[str]:
    """Return the paths of the leaves as JAX writes them, with the step's parameter names: "params['w']"."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        parameters = []
    names = [each.name for each in parameters if each.kind in POSITIONAL][: len(arguments)]
    rest = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    names += [f"{rest}[{index}]" for index in range(len(arguments) - len(names))]
    paths = []
    for keys, _ in jax.tree_util.tree_flatten_with_path((tuple(arguments), dict(keywords)))[0]:
        top = names[keys[1].idx] if keys[0].idx == 0 else keys[1].key
        paths.append(f"{top}{jax.tree_util.keystr(keys[2:])}")
    return paths


_ROLES = {
    "optimizer_state": (
        "opt_state", "optimizer_state", "opt", "optimizer", "moments", "optimizer_variables",
    ),
    "parameters": ("params", "parameters", "trainable_variables"),
    "model_state": ("batch_stats", "model_state", "non_trainable_variables"),
    "keys": ("key", "keys", "rng", "rngs", "rng_key", "dropout_key"),
}  # fmt: skip
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}


def role_in_tree(path: str, dtype: str) -> str:
    """Return the role of an argument by the first known name in its path, else the argument's own name.

    Only integers can be keys of random numbers: the `key` of an attention layer is a matrix.

    >>> role_in_tree("state.opt_state[0].mu['params']['w']", "float32"), role_in_tree("rows", "float32")
    ('optimizer_state', 'rows')
    """
    names = _names_in(path)
    known = (_ROLE_OF[name] for name in names if name in _ROLE_OF)
    return next((role for role in known if role != "keys" or dtype.startswith(("key", "uint32"))), names[0])


def _names_in(path: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", path)


_ROLE_OF_VARIABLE = {
    "Param": "parameters",
    "BatchStat": "model_state",
    "RngState": "keys",
    "OptState": "optimizer_state",
    "OptArray": "optimizer_state",
    "OptVariable": "optimizer_state",
}


def variables_of_nnx(
    arguments: Sequence[Any], keywords: Mapping[str, Any], paths: Sequence[str], inputs: Sequence[Any]
) -> dict[str, tuple[str, str]]:
    """Return the path and role of each variable of Flax NNX, by the path that `nnx.jit` gives it.

    `nnx.jit` passes the variables of a module as a list: "model.states[0][3]" is here "model.norm.mean", and
    its role follows from its class. The role is empty for a class of the user's own. Empty if the variables
    are not those of the inputs, as where `nnx.jit` divides a module by `StateSharding`.

    Args:
        arguments, keywords: of the call.
        paths: of its arrays, as the traced call has them.
        inputs: the last of these are the arrays' variables in the jaxpr.
    """
    nnx = sys.modules.get("flax.nnx")
    listed = [(path, given.aval) for path, given in zip(paths[::-1], inputs[::-1], strict=False)][::-1]
    listed = [(path, aval) for path, aval in listed if ".states[0][" in path]
    if nnx is None or not listed:
        return {}

    def is_node(part: Any) -> bool:
        return isinstance(part, nnx.Pytree | nnx.Variable)

    def kept(part: Any) -> Any:
        return part if any(map(is_node, jax.tree.leaves(part, is_leaf=is_node))) else None

    nodes = (tuple(map(kept, arguments)), {name: kept(part) for name, part in keywords.items()})
    state = nnx.to_flat_state(nnx.split(nodes)[1])
    variables = [(keys, each) for keys, each in state if isinstance(each, nnx.Variable)]
    found: dict[str, tuple[str, str]] = {}
    for (path, aval), (keys, variable) in zip(listed, variables, strict=False):
        value = jax.tree.leaves(variable)
        if len(value) != 1 or (value[0].shape, value[0].dtype) != (aval.shape, aval.dtype):
            return {}
        argument = path.partition(".states[0][")[0]
        inside = keys[2 + argument.count("[") :]
        own = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inside)
        found[path] = (argument + own, _role_of_variable(variable))
    return found if len(listed) == len(variables) else {}


def roles_of_classes(
    arguments: Sequence[Any], keywords: Mapping[str, Any], paths: Sequence[str]
) -> dict[str, str]:
    """Return the role of arrays by the class of an object that holds them, by their paths.

    A variable of Flax NNX has that of its class. A floating-point array of a module of Equinox is a parameter
    if no name in its path says something else. An `eqx.nn.State` is state of the model, a state of Optax that
    of the optimizer. Objects are looked for in tuples, lists and dictionaries, and within modules.

    Args:
        arguments, keywords: of the call.
        paths: of all leaves, as `argument_paths` returns them.
    """
    given = (tuple(arguments), dict(keywords))
    outer = jax.tree.leaves(given, is_leaf=lambda part: type(part) not in (tuple, list, dict))
    parts = [(whole, part) for whole in outer for part in jax.tree.leaves(whole, is_leaf=_is_of_one_role)]
    roles: dict[str, str] = {}
    left = iter(paths)
    for whole, part in parts:
        certain = _is_of_one_role(part)
        role = _role_of_class(part if certain else whole)
        for leaf in jax.tree.leaves(part):
            path, dtype = next(left), getattr(leaf, "dtype", None)
            if dtype is None or not role:
                continue
            is_named = role_in_tree(path, str(dtype)) != _names_in(path)[0]
            if certain or (jax.numpy.issubdtype(dtype, jax.numpy.inexact) and not is_named):
                roles[path] = role
    return roles


def _is_of_one_role(part: Any) -> bool:
    """Return whether all arrays of an object have its role: those of a module of Equinox may not."""
    equinox = sys.modules.get("equinox")
    return bool(_role_of_class(part)) and (equinox is None or not isinstance(part, equinox.Module))


def _role_of_class(part: Any) -> str:
    equinox, nnx = sys.modules.get("equinox"), sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(part, nnx.Variable):
        return _role_of_variable(part)
    if equinox is not None and isinstance(part, equinox.nn.State):
        return "model_state"
    if equinox is not None and isinstance(part, equinox.Module):
        return "parameters"
    kind = type(part)
    is_state = kind.__module__.startswith("optax.") and kind.__name__.endswith("State")
    return "optimizer_state" if is_state else ""


def _role_of_variable(variable: Any) -> str:
    classes = [base.__name__ for base in type(variable).__mro__]
    return next((_ROLE_OF_VARIABLE[name] for name in classes if name in _ROLE_OF_VARIABLE), "")


def described(step: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    """Return the path and role of each array of a call by its identity; a role is empty where unknown.

    A wrapper of a library may pass the same arrays on in another order, under names of its own.
    """
    paths = argument_paths(step, arguments, keywords)
    roles = roles_of_classes(arguments, keywords, paths)
    leaves = jax.tree.leaves((tuple(arguments), dict(keywords)))
    return {
        id(leaf): (path.removesuffix(".value"), roles.get(path, ""))
        for path, leaf in zip(paths, leaves, strict=True)
    }
