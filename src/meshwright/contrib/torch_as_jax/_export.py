"""Export the training loss of a PyTorch module as a list of ATen operations.

The module runs once on fake tensors under `torch.export`, as it is (in training mode unless it was put in
another). Composite operations stay whole where `operations.RULES` has one for them, and are decomposed by
PyTorch's own table where it has not. What PyTorch's export would drop in silence is kept or refused: where no
gradient flows (`detach`, `no_grad`), blocks that a checkpoint recomputes, autocast, and the backward pass of
an autograd Function. This module imports torch, so it is imported only while a module is exported.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._decomp import decomposition_table
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import traceback as annotations
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoints

from meshwright.contrib.jax_steps import USERS_FAILURES
from meshwright.contrib.torch_eager import (
    ONE_SEQUENCE,
    Fakes,
    as_given,
    check_parts,
    explain_failure,
    is_given,
    mode_of,
    repeated_blocks,
    surroundings,
    whole_sequences,
)
from meshwright.errors import InputError

from ._aten_rules import has_rule
from ._module_program import AS_PYTORCH, REPLACE, ArraySpec, GraphValue, ModuleProgram, Operation

MOST_NAMED = 12
CHECKPOINT = "meshwright_checkpoint"  # a key of a node's own metadata
OWN_LOSS = "The loss is the output's own `loss`."
NO_LOSS = "No loss was given: the sum of the output stands for it."
ASSERTIONS = ("aten::_assert_tensor_metadata", "aten::_assert_async", "aten::_assert_scalar")


def exported(
    module: Any,
    inputs: tuple[Any, ...],
    keyword_inputs: dict[str, Any],
    *,
    loss: Callable[[Any], Any] | None = None,
    compute: torch.dtype | None = None,
) -> ModuleProgram:
    """Return the program of a module's training loss; the module does not change.

    Args:
        module: real, on the meta device, or with fake tensors.
        inputs, keyword_inputs: the arguments of its `forward`.
        loss: a function from the module's output to one number; as for `mw.torch_step`.
        compute: the format of the parameters and of floating-point inputs in use; their own if None.

    Raises:
        InputError: the module cannot be exported, its loss needs no gradient or is not one number, or it uses
            operations without a rule. The error names all of them, each with the module where it is used.
    """
    module = as_given(module)
    check_parts(module, (inputs, keyword_inputs), None, loss, compute)
    fakes = Fakes(mode_of(module, (inputs, keyword_inputs)))
    ours = _Loss(fakes.module(module), loss)
    given = fakes.tree((tuple(inputs), dict(keyword_inputs)))
    names, buffers = _names(ours), {name for name, _ in ours.module.named_buffers(remove_duplicate=False)}
    stored = {name: str(p.dtype).removeprefix("torch.") for name, p in ours.module.named_parameters()}
    trained = {name for name, p in ours.module.named_parameters() if p.requires_grad}
    if compute is not None:
        given = _cast(ours.module, given, compute, fakes)
    found = _run(ours, given)
    _refuse_autocast(found.graph_module)
    _keep_detached(found.graph_module)
    found = _decomposed(found)
    return _GraphReader(found, ours, names, buffers, stored, trained, given).program()


def _decomposed(found: Any) -> Any:
    """Return the program with decompositions of what has no rule.

    PyTorch's default table leaves some operations whole that others of its tables decompose.

    Raises:
        InputError: a decomposition fails, as some do that write into a view.
    """
    defaults = torch.export.default_decompositions()
    table = {op: rule for op, rule in defaults.items() if not _is_known(op)}
    try:
        with warnings.catch_warnings(), surroundings():
            warnings.simplefilter("ignore")
            found = found.run_decompositions(table)
            targets = {node.target for node in found.graph.nodes if node.op == "call_function"}
            left = {op for op in targets if op in decomposition_table and not _is_known(op)}
            if left:
                more = {op: rule for op, rule in decomposition_table.items() if op in left}
                found = found.run_decompositions({**table, **more})
    except Exception as failed:  # an assertion or an error of PyTorch's own, of many kinds
        first = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
        what = f"PyTorch fails to decompose an operation of the module: {first}"
        raise InputError(what, hint=REPLACE) from failed
    return found


class _SeenInRun:
    """Holds what a run of the loss shows. The export would restore an attribute of the module."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.needs_gradient = True


class _Loss(torch.nn.Module):
    """A module whose output is the loss of another one."""

    def __init__(self, module: torch.nn.Module, loss: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.module = module
        self.seen = _SeenInRun()
        self._loss = loss
        self.training = module.training

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the loss, one number."""
        output = self.module(*args, **kwargs)
        value = self._value(output)
        self.seen.needs_gradient = value.requires_grad
        return value.reshape(())

    def _value(self, output: Any) -> torch.Tensor:
        own = getattr(output, "loss", None)
        if self._loss is not None:
            value = self._loss(output)
        elif isinstance(output, torch.Tensor) and output.numel() == 1:
            return output
        elif isinstance(own, torch.Tensor):
            value = own
            self.seen.notes = [OWN_LOSS]
        else:
            self.seen.notes = [NO_LOSS]
            leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
            return torch.stack([x.float().sum() for x in leaves if x.is_floating_point()]).sum()
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, torch.Tensor)
            what = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise InputError(f"the loss is {what}, not one number", hint="end it in .mean() or .sum()")
        return value


def _names(ours: _Loss) -> dict[str, str]:
    """Return the first name of each parameter and buffer by all of its names: tied ones have several."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    tensors = (
        *ours.module.named_parameters(remove_duplicate=False),
        *ours.module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        names[name] = first.setdefault(id(tensor), name)
    return names


def _cast(module: torch.nn.Module, given: Any, dtype: torch.dtype, fakes: Fakes) -> Any:
    """Cast the parameters of a fake module in place; return its inputs cast too. Buffers stay as they are."""
    cast: dict[int, torch.nn.Parameter] = {}
    with fakes._mode, torch.no_grad():
        for part in module.modules():
            for name, old in list(part._parameters.items()):
                if old is None or not old.is_floating_point():
                    continue
                if id(old) not in cast:
                    cast[id(old)] = torch.nn.Parameter(
                        old.detach().to(dtype), requires_grad=old.requires_grad
                    )
                part._parameters[name] = cast[id(old)]
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, given
        )


@contextlib.contextmanager
def _marked_checkpoints() -> Iterator[None]:
    """Mark the operations of blocks that `torch.utils.checkpoint` would run again in the backward pass."""
    count = iter(range(1 << 30))

    def marked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for ours in ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop"):
            kwargs.pop(ours, None)
        kwargs.pop("preserve_rng_state", None)
        with annotations.annotate({CHECKPOINT: next(count)}):
            return function(*args, **kwargs)

    generator = "_checkpoint_without_reentrant_generator"

    def without_reentrant(
        function: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Any = checkpoints.noop_context_fn,
        *_: Any,
        **__: Any,
    ) -> Iterator[None]:
        if context_fn is not checkpoints.noop_context_fn:
            raise InputError(
                "a checkpoint with a policy (context_fn) has no counterpart in the JAX program",
                hint=f"use plain torch.utils.checkpoint, or {AS_PYTORCH}",
            )
        with annotations.annotate({CHECKPOINT: next(count)}):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return marked(function, *args)

    with (
        mock.patch.object(checkpoints, generator, without_reentrant),
        mock.patch.object(checkpoints, "CheckpointFunction", Reentrant),
    ):
        yield


@contextlib.contextmanager
def _refused_functions() -> Iterator[None]:
    """Refuse an autograd Function of the user's: an export keeps its forward pass, and drops its backward."""
    apply = torch.autograd.Function.__dict__["apply"].__func__

    def refused(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind.__module__.partition(".")[0] == "torch":
            return apply(kind, *args, **kwargs)
        raise InputError(
            f"{kind.__name__} is a torch.autograd.Function, whose backward pass the export does not keep",
            hint=f"write it as plain operations, or {AS_PYTORCH}",
        )

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(refused)):
        yield


@contextlib.contextmanager
def _causal_by_flag(module: torch.nn.Module, given: Any) -> Iterator[None]:
    """Let `transformers` ask for causal attention by its flag, as in a run; an export gets a mask.

    Where a mask is given, a run looks at its values, so the export keeps it.
    """
    masks = sys.modules.get("transformers.masking_utils")
    args, kwargs = given
    if not hasattr(masks, "is_torchdynamo_exporting") or is_given(module, args, kwargs, "attention_mask"):
        yield
        return
    with mock.patch.object(masks, "is_torchdynamo_exporting", return_value=False):
        yield


def _run(ours: _Loss, given: Any) -> Any:
    """Return the exported program of the loss, before decompositions."""
    told = whole_sequences(ours.module, *given)
    paths = {id(part): path for path, part in ours.module.named_modules()}
    try:
        with (
            surroundings(),
            _marked_checkpoints(),
            _refused_functions(),
            annotations.preserve_node_meta(),
            warnings.catch_warnings(),
            _causal_by_flag(ours.module, given),
            told as are_told,
        ):
            warnings.simplefilter("ignore")
            found = torch.export.export(ours, given, strict=False)
    except InputError:
        raise
    except USERS_FAILURES as failed:
        if isinstance(failed.__cause__, InputError):
            raise failed.__cause__ from None
        if "data-dependent" in str(failed) or "unbacked" in str(failed).lower():
            raise InputError(
                f"the export of {type(ours.module).__name__} failed: a branch or a shape depends on values: "
                f"{str(failed).strip().splitlines()[0]}",
                hint="a compiled program has fixed shapes: replace that part of the module",
            ) from failed
        hint = "torch.export.export(module, args, strict=False) fails in the same way"
        raise explain_failure(failed, "the export", paths, hint) from failed
    if not ours.seen.needs_gradient:
        raise InputError("the loss depends on no trained parameter", hint="leave torch.no_grad out of it")
    if are_told:
        ours.seen.notes.append(ONE_SEQUENCE)
    return found


def _graphs(module: Any) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield part.graph


def _refuse_autocast(module: Any) -> None:
    for graph in _graphs(module):
        for node in graph.nodes:
            if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2]:
                raise InputError(
                    f"the module enters torch.autocast {_place(node)}, which its export does not keep",
                    hint="leave autocast out; autocast=torch.bfloat16 computes everything in that format",
                )


def _keep_detached(module: Any) -> None:
    """Detach the results of regions without gradients: decompositions dissolve such a region."""
    regions = torch.ops.higher_order.wrap_with_set_grad_enabled
    for graph in _graphs(module):
        for node in [n for n in graph.nodes if n.target is regions and not n.args[0]]:
            for user in [u for u in node.users if u.target is operator.getitem]:
                value = user.meta.get("val")
                if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    continue
                with graph.inserting_after(user):
                    cut = graph.call_function(torch.ops.aten.detach.default, (user,))
                cut.meta = dict(user.meta)
                user.replace_all_uses_with(cut, delete_user_cb=lambda n, cut=cut: n is not cut)


def _place(node: Any) -> str:
    path = _path(node)
    return f"in {path}" if path else "in the module itself"


def _path(node: Any) -> str:
    """Return the path of the module that runs an operation, "" for the outermost one."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("L['self'].").removeprefix("module").removeprefix(".")


class _GraphReader:
    """Read an exported program into our own records."""

    def __init__(
        self,
        found: Any,
        ours: _Loss,
        names: dict[str, str],
        buffers: set[str],
        stored: dict[str, str],
        trained: set[str],
        given: Any,
    ) -> None:
        self.found, self.ours, self.names, self.given = found, ours, names, given
        self.buffers, self.stored, self.trained = buffers, stored, trained
        self.sources: dict[str, tuple[str, str]] = {}  # of each placeholder: its kind and name
        self.shapes: dict[str, dict[str, ArraySpec]] = {"parameters": {}, "buffers": {}, "inputs": {}}
        self.constants: dict[str, Any] = {}

    def program(self) -> ModuleProgram:
        """Return the program.

        Raises:
            InputError: operations without a rule.
        """
        self._read_inputs()
        nodes = [n for n in self.found.graph.nodes if n.op == "call_function"]
        nodes = [n for n in nodes if _name(n.target) not in ASSERTIONS]
        self._check(nodes)
        operations = tuple(_operation(node) for node in nodes)
        updates, result = self._outputs()
        return ModuleProgram(
            name=type(self.ours.module).__name__,
            operations=operations,
            sources=self.sources,
            constants=self.constants,
            parameters=self.shapes["parameters"],
            stored=self.stored,
            frozen=tuple(n for n in self.shapes["parameters"] if n not in self.trained),
            buffers=self.shapes["buffers"],
            inputs=self.shapes["inputs"],
            blocks=tuple(repeated_blocks(self.ours.module)),
            updates=updates,
            result=result,
            notes=tuple(self.ours.seen.notes),
        )

    def _read_inputs(self) -> None:
        inputs = iter(_leaf_names(self.given))
        values = {n.name: n.meta.get("val") for n in self.found.graph.nodes if n.op == "placeholder"}
        for spec in self.found.graph_signature.input_specs:
            placeholder, target = spec.arg.name, (spec.target or "").removeprefix("module.")
            value = values.get(placeholder)
            if spec.kind == InputKind.USER_INPUT:
                name = next(inputs)
                if isinstance(value, torch.Tensor):
                    self._source(placeholder, "inputs", name, value)
                else:
                    self.constants[placeholder] = value
            elif spec.kind == InputKind.PARAMETER:
                self._source(placeholder, "parameters", self.names[target], value)
            elif spec.kind == InputKind.BUFFER:
                self._source(placeholder, "buffers", self.names.get(target, target), value)
            else:
                self._constant(placeholder, spec.target or "", value)

    def _source(self, placeholder: str, kind: str, name: str, value: Any) -> None:
        self.sources[placeholder] = kind, name
        self.shapes[kind][name] = ArraySpec(shape=tuple(value.shape), dtype=_dtype(value.dtype))

    def _constant(self, placeholder: str, target: str, value: Any) -> None:
        """Keep the values of a constant; one without values is an argument, as a buffer is."""
        constant = self.found.constants.get(target)
        known = isinstance(constant, torch.Tensor) and constant.device.type != "meta"
        if known and type(constant) in (torch.Tensor, torch.nn.Parameter):
            wide = constant.detach()
            self.constants[placeholder] = (wide.float() if wide.dtype == torch.bfloat16 else wide).numpy()
        else:
            self._source(placeholder, "buffers", target.removeprefix("module.") or placeholder, value)

    def _check(self, nodes: list[Any]) -> None:
        for node in nodes:
            sizes = getattr(node.meta.get("val"), "shape", ())
            if not all(isinstance(size, int) for size in sizes):
                raise InputError(
                    f"the shape of {_name(node.target).replace('::', '.')} {_place(node)} depends on values",
                    hint="a compiled program has fixed shapes: replace that part of the module",
                )
        missing: Counter[str] = Counter()
        for node in nodes:
            if node.target is operator.getitem:
                continue
            if not isinstance(node.target, torch._ops.OpOverload):
                missing[f"{getattr(node.target, '__name__', node.target)} {_place(node)}"] += 1
            elif not _is_known(node.target):
                missing[f"{_name(node.target).replace('::', '.')} {_place(node)}"] += 1
        if missing:
            listed = [f"{what}" + f" ({times} times)" * (times > 1) for what, times in missing.items()]
            more = f", and {len(listed) - MOST_NAMED} more places" * (len(listed) > MOST_NAMED)
            raise InputError(
                f"{type(self.ours.module).__name__} uses operations that have no rule in JAX: "
                + ", ".join(listed[:MOST_NAMED]) + more,
                hint=REPLACE,
            )  # fmt: skip

    def _outputs(self) -> tuple[dict[str, str], str]:
        """Return the value that each changed buffer takes, by its name, and the loss."""
        updates: dict[str, str] = {}
        result = ""
        for spec in self.found.graph_signature.output_specs:
            if spec.kind == OutputKind.BUFFER_MUTATION:
                name = (spec.target or "").removeprefix("module.")
                updates[self.names.get(name, name)] = spec.arg.name or ""
            elif spec.kind == OutputKind.USER_OUTPUT:
                result = spec.arg.name or ""
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                raise InputError(
                    f"the module changes its input {spec.target} in place", hint="let it change a copy"
                )
        return updates, result


def _leaf_names(given: Any) -> list[str]:
    """Return a name for each leaf of (args, kwargs): "input_ids", or "args[0]" for one without a name."""
    names = []
    for path, _ in pytree.tree_leaves_with_path(given):
        first, *rest = (getattr(entry, "idx", getattr(entry, "key", None)) for entry in path)
        is_named = first == 1
        text = pytree.keystr(path[1:])
        if is_named:
            text = str(rest[0]) + pytree.keystr(path[2:])
        names.append(text if is_named else f"args{text}")
    return names


def _is_known(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and has_rule(target._schema.name, target._overloadname)


def _name(target: Any) -> str:
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(tree: Any) -> Any:
    """Return arguments with references to values by name, and without devices and memory formats."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.fx.Node):
            return GraphValue(leaf.name)
        if isinstance(leaf, torch.dtype):
            return _dtype(leaf)
        if isinstance(leaf, torch.device | torch.memory_format | torch.layout):
            return None
        return leaf

    if isinstance(tree, list | tuple):
        return [_plain(leaf) for leaf in tree]
    if isinstance(tree, dict):
        return {name: _plain(leaf) for name, leaf in tree.items()}
    return one(tree)


UNUSED = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def _operation(node: Any) -> Operation:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    arrays = tuple(
        ArraySpec(shape=tuple(v.shape), dtype=_dtype(v.dtype)) if isinstance(v, torch.Tensor) else None
        for v in values
    )
    custom = node.meta.get("custom") or {}
    is_item = node.target is operator.getitem
    return Operation(
        result=node.name,
        name="getitem" if is_item else _name(node.target),
        overload="" if is_item else node.target._overloadname,
        args=tuple(_plain(node.args)),
        kwargs={name: _plain(arg) for name, arg in node.kwargs.items() if name not in UNUSED},
        arrays=arrays,
        is_tuple=isinstance(value, list | tuple),
        path=_path(node),
        checkpoint=custom.get(CHECKPOINT),
    )
