"""Run a user's script until its training step repeats, and lower that step for a fleet.

Run as `python -m meshwright.contrib.scripts._script_process PARENT_PID FOLDER`. FOLDER/script.json is a
`ScriptRequest`. The script runs unchanged as `__main__`. `jax.devices()` answers as the fleet, and arrays are
shapes. Its jitted calls with matrix products are the candidates. At the second call of the largest one that
has a backward pass, that call is lowered from the arguments of its first call. The process then ends at once,
so that nothing of the script runs afterwards. FOLDER/answer.json holds a `ScriptAnswer` or an error.
"""

from __future__ import annotations

import ast
import dataclasses
import faulthandler
import functools
import itertools
import linecache
import os
import re
import runpy
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshwright.compiler import TracedFlops
from meshwright.contrib.jax_steps import USERS_FAILURES, find_function, leak_error, needs, where
from meshwright.errors import InputError, MeshwrightError
from meshwright.subprocesses import end_after, guard, spoiled
from meshwright.worker import set_environment

from ._run_script import Candidate, ScriptAnswer, ScriptRequest

if TYPE_CHECKING:
    from meshwright.contrib.jax_steps import LoweredText

LARGE_BYTES = 2**20  # a larger array that the script reads and that is not known stops it
SECONDS_WITHOUT_BACKWARD = 60.0  # after which the largest call is taken, if no call has a backward pass
FOR_TORCH = (
    "let a function return its module and one batch, and weigh that by its name, FILE.py:function; "
    "docs/how-to/pytorch.md has an example"
)
SHARDING = re.compile("sharding|Explicit|mesh", re.IGNORECASE)  # what errors of meshes speak of
CALLS_FOR_ALL = 50  # of the chosen call, before each call is weighed
MOST_NOTES = 6


def main(parent: int, folder: Path) -> None:
    """Run the script of the folder's request. Every error that the user can act on becomes an answer."""
    guard(parent)
    faulthandler.enable()
    request = ScriptRequest.from_json((folder / "script.json").read_text())
    try:
        try:
            _run(request, folder)
        except MeshwrightError as error:
            clear = isinstance(error, _ClearError)
            _answer(folder, ScriptAnswer(error=error.message, hint=error.hint, shows_output=not clear))
    except OSError as refused:
        file = Path(str(refused.filename))
        if not file.is_relative_to(folder):
            raise
        sys.exit(spoiled(file, refused.strerror or "").message)


class _ClearError(InputError):
    """An error after which what the script printed says nothing more."""


def _answer(folder: Path, answer: ScriptAnswer) -> None:
    """Write the answer and end this process, whatever the script has left running."""
    part = folder / "answer.part"
    part.write_text(answer.to_json())
    part.rename(folder / "answer.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(request: ScriptRequest, folder: Path) -> None:
    set_environment()
    import jax

    if request.topology:
        from jax.experimental import topologies

        devices = list(topologies.get_topology_desc(**request.topology).devices)
    else:
        jax.config.update("jax_num_cpu_devices", request.num_devices)
        devices = jax.devices()
    watch = _Watch(request, folder)
    from meshwright.contrib.jax_steps import as_the_fleet, held_as_shapes
    from meshwright.worker import libraries_of_plugin

    from ._libraries import at_torch_steps, meshes_without_types, without_checkpoints

    without_checkpoints(watch.left_out)
    at_torch_steps(watch.torch_step)
    as_fleet, libraries = as_the_fleet(devices, request.platform), libraries_of_plugin(request.platform)
    meshes = meshes_without_types(watch.mesh_without_types, auto=request.auto_meshes)
    with as_fleet, libraries, meshes, held_as_shapes(watch, devices[0]):
        if request.function:
            _answer(folder, ScriptAnswer(candidates=(_of_function(request, folder),)))
        watch.finish(_run_as_main(request))


def _of_function(request: ScriptRequest, folder: Path) -> Candidate:
    """Return the step that a function without a mesh returns, lowered with its arguments.

    Raises:
        InputError: the function or its module does not exist, or fails, or returns something else.
    """
    from meshwright.contrib.jax_steps import JAX, checked_program, lowered_call, unreplaced

    name = request.function
    function = find_function(name, (os.getcwd(),), libraries=JAX)
    try:
        returned = function()
    except ModuleNotFoundError as missing:
        raise needs(name, missing) from missing
    except MeshwrightError:
        raise
    except USERS_FAILURES as failed:
        raise InputError(
            f"{name}() failed {where(failed, JAX)}",
            hint="it is called where jax.devices() answers as the fleet and arrays are held as shapes",
        ) from failed
    step, arguments, keywords = checked_program(name, returned)
    with unreplaced():
        lowered = lowered_call(step, arguments, keywords, request.platform)
    flops = sum(flops for phase, flops in lowered.traced_flops.by_phase.items() if phase != "recompute")
    about = Candidate(name=name, place="", num_calls=0, model_flops=flops, has_backward=False)
    return _with_files(about, lowered, folder / "step")


def _with_files(about: Candidate, lowered: LoweredText, folder: Path) -> Candidate:
    """Write a call's program into a new folder, and return the candidate with its facts."""
    folder.mkdir()
    files = lowered.files()
    for name, text in files.items():
        (folder / name).write_text(text)
    return dataclasses.replace(
        about,
        files=tuple(f"{folder.name}/{name}" for name in files),
        digest=lowered.digest,
        num_devices=lowered.num_devices,
        mesh_axes=lowered.mesh_axes,
    )


def _run_as_main(request: ScriptRequest) -> str:
    """Run the script, and return how it ended: empty, or its exception with the line."""
    first, *rest = request.command
    try:
        if first == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(first).resolve().parent))
            sys.argv = [first, *rest]
            runpy.run_path(first, run_name="__main__")
    except MeshwrightError:
        raise
    except SystemExit as left:
        return "" if not left.code else f"it ended with exit status {left.code}"
    except BaseException as failed:
        places = [
            _place(frame) for frame in traceback.extract_tb(failed.__traceback__) if _is_users(frame.filename)
        ]
        where = f" at {places[-1]}" if places else ""
        if type(failed).__name__ == "UnexpectedTracerError":  # JAX's text of 14 lines names frames of ours
            words = leak_error(cast("Exception", failed), places[-1] if places else "").message
            sys.stderr.write(f"{words}\n")
            return words
        traceback.print_exc()
        return f"{type(failed).__name__}{where}: {str(failed)[:400]}"
    return ""


@dataclasses.dataclass(kw_only=True)
class _Call:
    """A jitted call of the script with matrix products, as it was called first."""

    name: str
    place: str
    flops: TracedFlops
    traced: Any
    paths: tuple[tuple[str, str], ...]  # of each argument, with its role; both empty where unknown
    times: int = 1

    @property
    def model_flops(self) -> int:
        """Return its FLOPs without recomputation."""
        return sum(flops for phase, flops in self.flops.by_phase.items() if phase != "recompute")

    @property
    def has_backward(self) -> bool:
        """Return whether it computes gradients."""
        return self.flops.by_phase["backward"] > 0


class _Watch:
    """Collects the script's jitted calls and its reads, and ends the process at the right call."""

    def __init__(self, request: ScriptRequest, folder: Path) -> None:
        self._request, self._folder = request, folder
        self._calls: dict[tuple[str, ...], _Call] = {}
        self._counted: dict[int, tuple[Any, TracedFlops]] = {}
        self._reads: dict[str, str] = {}  # by line: how, and the branch that depends on it
        self._lock = threading.RLock()
        self._started: float | None = None  # the first call
        self._untyped: dict[str, None] = {}  # lines that make a mesh without the types of its axes

    def has_products(self, closed: Any) -> bool:
        """Return whether a jaxpr has matrix products."""
        return any(self._flops(closed).by_phase.values())

    def called(self, args: Sequence[Any], params: dict[str, Any]) -> bool:
        """Take note of a jitted call of the script's with matrix products, and return whether it is one."""
        with self._lock:
            self._started = self._started or time.monotonic()
            closed = params["jaxpr"]
            if (_is_own(closed) and not _is_mapped(closed)) or not self.has_products(closed):
                return False
            name = "pmap" if _is_own(closed) else params["name"]
            key = (name, *(f"{aval.dtype}{aval.shape}" for aval in closed.in_avals))
            if key in self._calls:
                self._calls[key].times += 1
            else:
                place = next((_place(frame) for frame in _user_frames()), "")
                traced = _traced_call(args, params)
                known = _described()
                paths = tuple(known.get(id(value), ("", "")) for value in args)
                self._calls[key] = _Call(
                    name=name, place=place, flops=self._flops(closed), traced=traced, paths=paths
                )
            if self._is_enough(self._calls[key]):
                self.finish("")
            return True

    def left_out(self, what: str) -> None:
        """Take note of something that the script asks for at its present line and that is not done."""
        frames = _user_frames()
        line = _place(frames[0]) if frames else "a library"
        self._reads.setdefault(f"{line} {what}", f"{what} at {line} is left out")

    def _flops(self, closed: Any) -> TracedFlops:
        if id(closed) not in self._counted:
            from meshwright.worker import count_traced

            self._counted[id(closed)] = (
                closed,
                count_traced(getattr(closed, "jaxpr", closed), self._request.platform),
            )
        return self._counted[id(closed)][1]

    def _is_enough(self, call: _Call) -> bool:
        backward = [each for each in self._calls.values() if each.has_backward]
        if call is not self._chosen():
            return False
        if not backward:  # text may be sampled before the training begins
            return time.monotonic() - (self._started or 0) > SECONDS_WITHOUT_BACKWARD
        return call.times >= (CALLS_FOR_ALL if self._request.all_calls else 2)

    def _chosen(self) -> _Call:
        """Return the largest call, preferring those with a backward pass, and of these those that repeat."""
        calls = list(self._calls.values())
        backward = [each for each in calls if each.has_backward] or calls
        repeated = [each for each in backward if each.times > 1] or backward
        return max(repeated, key=lambda each: each.model_flops)

    def read(self, array: Any, how: str) -> None:
        """Take note that the script reads an array whose value is not known.

        Raises:
            InputError: the array is large, and no step with a backward pass was called yet.
        """
        with self._lock:
            frames = _user_frames()
            line = _place(frames[0]) if frames else "a library"
            num_bytes = array.size * getattr(array.dtype, "itemsize", 1)
            if num_bytes > LARGE_BYTES:
                if any(each.has_backward for each in self._calls.values()):
                    self.finish("")
                raise InputError(
                    f"the script reads {num_bytes / 2**20:.1f} MiB of computed values on the host at {line} "
                    f"({how}), before a training step was called",
                    hint="arrays are held as shapes and have no values: weigh the step by itself, "
                    "mw.weigh(step, args=..., on=...)",
                )
            if line not in self._reads:
                branch = next(filter(None, map(_branch_of, frames)), "")
                code = linecache.getline(frames[0].filename, frames[0].lineno or 0).strip() if frames else ""
                self._reads[line] = f"{how} is read on the host at {line}: {code[:80]}" + (
                    f"; {branch}, and one branch was taken" if branch else ""
                )

    def torch_step(self) -> None:
        """End the process before an optimizer of PyTorch steps, unless JAX computed gradients before it."""
        if any(call.has_backward for call in self._calls.values()):
            return
        place = next((_place(frame) for frame in _user_frames()), "a library")
        what = f"the script trains with PyTorch: an optimizer of torch.optim steps at {place}"
        _answer(self._folder, ScriptAnswer(error=what, hint=FOR_TORCH, shows_output=False))

    def mesh_without_types(self) -> None:
        """Take note of the script's present line, which makes a mesh without the types of its axes."""
        frames = _user_frames()
        if frames:
            self._untyped.setdefault(_place(frames[0]))

    def finish(self, ended: str) -> None:
        """Lower the chosen calls, answer, and end the process. `ended`: the script's failure, or empty."""
        by_itself = "weigh the step by itself: mw.weigh(step, args=..., on=...)"
        if self._untyped and not self._request.auto_meshes and SHARDING.search(ended):
            raise _ClearError(
                f"the script failed, {ended.partition('. ')[0]}\n  JAX since 0.9 makes the axes of a mesh "
                f"Explicit, and the script expects Auto ones: jax.make_mesh gets no axis_types at "
                f"{', '.join(self._untyped)}",
                hint="give it axis_types=(jax.sharding.AxisType.Auto,) * the number of axes, as JAX needs it "
                "on real devices too; or weigh the script as it is with --auto-meshes",
            )
        if ended and not any(call.has_backward for call in self._calls.values()):
            raise InputError(
                f"the script failed before it called a jitted function with a backward pass: {ended}",
                hint=f"its error is above; {self._of_torch() or by_itself}",
            )
        if not self._calls:
            raise InputError(
                "the script ran to its end and called no jitted function with matrix products",
                hint=self._of_torch() or f"put the training step into jax.jit; or {by_itself}",
            )
        chosen = self._chosen()
        rest = sorted((c for c in self._calls.values() if c is not chosen), key=lambda c: -c.model_flops)
        notes = list(self._reads.values())
        branching = [note for note in notes if "one branch was taken" in note]
        notes = [*branching, *(note for note in notes if note not in branching)][:MOST_NOTES]
        if self._untyped and self._request.auto_meshes:
            lines = ", ".join(self._untyped)
            notes.insert(0, f"axes of the mesh at {lines} are Auto here; JAX since 0.9 makes them Explicit")
        if ended:
            notes.insert(0, f"the script failed after {chosen.name} had run {chosen.times} times: {ended}")
        weighed = [chosen, *rest] if self._request.all_calls else [chosen]
        candidates = [
            self._lowered(call, index if call in weighed else None)
            for index, call in enumerate([chosen, *rest])
        ]
        _answer(self._folder, ScriptAnswer(candidates=tuple(candidates), notes=tuple(notes)))

    def _of_torch(self) -> str:
        """Return what to do with a script that has imported PyTorch and called nothing of JAX; else ""."""
        return f"if it trains with PyTorch: {FOR_TORCH}" if "torch" in sys.modules and not self._calls else ""

    def _lowered(self, call: _Call, index: int | None) -> Candidate:
        about = Candidate(
            name=call.name,
            place=call.place,
            num_calls=call.times,
            model_flops=call.model_flops,
            has_backward=call.has_backward,
        )
        if index is None:
            return about
        from meshwright.contrib.jax_steps import argument_names, lowered_text, unreplaced

        both = list(zip(argument_names(call.traced), call.paths, strict=True))
        names = [path or name for name, (path, _) in both]
        roles = {path: role for path, role in call.paths if role}
        try:
            with unreplaced():
                lowered = lowered_text(call.traced, names, self._request.platform, roles)
        except Exception as failed:
            raise InputError(
                f"the call of {call.name} at {call.place} failed while it was lowered: "
                f"{type(failed).__name__}: {failed}",
                hint="weigh the step by itself: mw.weigh(step, args=..., on=...)",
            ) from failed
        if lowered.answers is not None:
            raise InputError(
                f"{call.name} at {call.place} has calls with a partitioning rule of their own, such as "
                "cuDNN's attention, which cannot be asked after the script has ended",
                hint="weigh the step by itself: mw.weigh(step, args=..., on=...)",
            )
        return _with_files(about, lowered, self._folder / f"call{index}")


def _is_own(closed: Any) -> bool:
    """Return whether a jitted function is JAX's own, such as `jnp.dot`."""
    import jax

    return f" at {Path(jax.__file__).parent}" in str(closed.jaxpr.debug_info.func_src_info)


def _is_mapped(closed: Any) -> bool:
    """Return whether a jitted function is one `shard_map`, as JAX makes of `jax.pmap`."""
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns] == ["shard_map"]


def _traced_call(args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Return a call as JAX holds it between tracing and lowering."""
    import inspect

    import jax
    from jax._src.pjit import convert_to_metaty
    from jax.sharding import NamedSharding

    metas = []
    for value, aval in zip(args, params["jaxpr"].in_avals, strict=True):
        placed = getattr(value, "placed", getattr(value, "sharding", None))
        sharding = placed if isinstance(placed, NamedSharding) else None
        shape = jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
        )
        metas.append(convert_to_metaty(shape))
    in_tree = jax.tree.structure((tuple(range(len(metas))), {}))
    out_tree = jax.tree.structure(tuple(range(len(params["jaxpr"].out_avals))))
    parts = {"meta_tys_flat": metas, "params": params, "in_tree": in_tree, "out_tree": out_tree, "consts": []}
    if "fun_sourceinfo" in inspect.signature(jax.stages.Traced).parameters:
        parts["fun_sourceinfo"] = None
    return jax.stages.Traced(**parts)


LIBRARIES = tuple(
    str(Path(folder).resolve())
    for folder in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        *site.getsitepackages(),
        str(Path(__file__).parents[2]),
    }
)


@functools.cache
def _is_users(file: str) -> bool:
    """Return whether a file is of no library; an environment may be reached through a link."""
    return not file.startswith("<") and not os.path.realpath(file).startswith(LIBRARIES)


def _user_frames() -> list[traceback.FrameSummary]:
    """Return the user's own frames of this thread, the innermost first, each with its column."""
    frames: list[traceback.FrameSummary] = []
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
            at, name = (code.co_filename, frame.f_lineno), code.co_name
            frames.append(traceback.FrameSummary(*at, name, lookup_line=False, colno=place[2]))
        frame = frame.f_back
    return frames


def _described() -> dict[int, tuple[str, str]]:
    """Return the paths and roles of the arrays that the script passes to a library's own `jit`, by identity.

    They are read from the library's frames. Empty where the script calls `jax.jit`, which names them.
    """
    import jax

    from meshwright.contrib.jax_steps import described, plain

    found: dict[int, tuple[str, str]] = {}
    frame = sys._getframe()
    while frame is not None and not _is_users(frame.f_code.co_filename):
        known, file = dict(frame.f_locals), frame.f_code.co_filename
        is_wrapper = "self" in known and not file.startswith(str(Path(jax.__file__).parent))
        if {"args", "kwargs"} <= known.keys() and (is_wrapper or file.endswith("pmap.py")):
            found = described(plain(known.get("self")), known["args"], known["kwargs"]) | found
        frame = frame.f_back
    return found


def _place(frame: traceback.FrameSummary) -> str:
    folder = os.getcwd() + os.sep
    return f"{frame.filename.removeprefix(folder)}:{frame.lineno}"


def _branch_of(frame: traceback.FrameSummary) -> str:
    """Describe the branch in a frame's function that may depend on the statement being run; "" if none does.

    The statement's test itself, or one that reads a name to which the statement's value flows.
    """
    try:
        tree = ast.parse(Path(frame.filename).read_text())
    except (OSError, SyntaxError, ValueError):
        return ""
    number = frame.lineno or 0
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _holds(node, number):
            scope = node  # the walk meets the inner ones later
    tests = [
        node for node in ast.walk(scope) if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert)
    ]
    here = next((node for node in tests if _runs(node.test, frame)), None)
    if here is None:
        names = _names_from(scope, number)
        reads = (node for node in tests if node.test.lineno >= 1 and names & _loaded(node.test))
        here = next(reads, None)
    if here is None:
        return ""
    code = linecache.getline(frame.filename, here.lineno).strip()
    return f"line {here.lineno} branches on it ({code[:60]})"


def _holds(node: Any, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _runs(test: Any, frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is at work in a test, and not in the branch on the line of its test."""
    if not _holds(test, frame.lineno or 0):
        return False
    end = test.end_lineno, test.end_col_offset
    return frame.colno is None or (test.lineno, test.col_offset) <= (frame.lineno, frame.colno) < end


def _loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _names_from(scope: ast.AST, line: int) -> set[str]:
    """Return the names that hold what the statement on a line computes, directly or through others."""
    flows = []
    for node in ast.walk(scope):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value:
            stored = {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}
            flows.append((node, stored, _loaded(node.value)))
    found = {name for node, stored, _ in flows if _holds(node, line) for name in stored}
    while more := {name for _, stored, loaded in flows if loaded & found for name in stored} - found:
        found |= more
    return found


if __name__ == "__main__":
    end_after(lambda: main(int(sys.argv[1]), Path(sys.argv[2])))
