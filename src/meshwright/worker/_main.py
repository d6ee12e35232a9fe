"""Run a compile worker: `python -m meshwright.worker._main PARENT_PID [WORK_FOLDER MADE_FOLDER]`.

It reads WORK_FOLDER/request.json, imports the step's builder by name, traces, compiles for the target, and
fills MADE_FOLDER with a `Compiled`. WORK_FOLDER/phases has a line for each phase of its work, and
WORK_FOLDER/pid its process number. It writes answer.json last. When its parent ends, it ends too, with all
processes that the user's function started.

Without folders, the process becomes a template: it imports what every worker needs, then forks a worker for
each request: a line of JSON on its standard input, written by `compiler.warm_workers`, with both folders, the
working directory and variables of the environment. Files in WORK_FOLDER tell the caller the fork's process
number and, at its end, its exit status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import re
import select
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.compiler import (
    JAX_CACHE_FOLDER,
    PID_FILE,
    SCHEMA,
    STATUS_FILE,
    STDERR_FILE,
    TEXTS,
    AcceptedOptions,
    Argument,
    Compiled,
    OptionValue,
    Refusal,
    Request,
    TakesNoMesh,
    accepted_options,
    cache_root,
    cached_program,
    check_refused_results,
    fingerprint_of,
    installed_versions,
    loading_results,
    user_flags,
    writing_cache,
)
from meshwright.errors import CompileError, InputError, MeshwrightError
from meshwright.subprocesses import begin_phase, end_after, guard

from ._optimised import Gate, is_steady, may_fail_late, optimised, put_assembler
from ._reports import OutOfMemory, are_written, bytes_in, could_not_compile, program_in, texts_in

if TYPE_CHECKING:
    from ._kernels_alone import KernelsAlone

DUMP_OPTIONS = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "NONE"}
TOOLKIT = "cuda"  # in a worker's folder
ROLES = {
    "parameters": "parameters",
    "frozen": "frozen_parameters",
    "optimizer": "optimizer_state",
    "master": "optimizer_state",
    "model_state": "model_state",
    "key": "keys",
}


def main(work: Path, made: Path, parent: int) -> None:
    """Serve one request. Every error that the user can act on becomes an answer."""
    guard(parent)
    faulthandler.enable()  # a crash then prints the line of Python
    (work / "pid").write_text(str(os.getpid()))
    request = Request.from_json((work / "request.json").read_text())
    try:
        serve = _describe if request.describes else _compile_text if request.digest else _compile
        answer = serve(request, work, made)
    except MeshwrightError as error:
        kinds = (TakesNoMesh, InputError, CompileError)
        kind = next((each.__name__ for each in kinds if isinstance(error, each)), CompileError.__name__)
        answer = {"error": kind, "message": error.message, "hint": error.hint}
    (work / "answer.json").write_text(json.dumps(answer))


def _compile_text(request: Request, work: Path, made: Path) -> dict[str, str]:
    """Compile a program that the caller has traced and lowered."""
    started = time.monotonic()
    set_environment()
    steps = _steps()
    lowered = steps.LoweredText.load(work)
    steps.ask_in(work)
    devices = _devices(request)
    begin_phase(work, "compiling")
    chosen, outputs = devices[: lowered.num_devices], _outputs(request, work)
    accepted = accepted_options(request.options, _identity())
    options = {**accepted.options, **outputs}
    try:
        analysis = _optimise(
            request,
            work,
            lambda: steps.compiled_text(lowered, chosen, options, request.name).get_compiled_memory_stats(),
        )
    except OutOfMemory as refused:
        return _refused(request, refused, started, lowered.arguments, mesh_axes=request.mesh_axes)
    _save(
        request,
        work,
        made,
        accepted,
        analysis,
        mesh_axes=request.mesh_axes,
        arguments=lowered.arguments,
        traced_flops=lowered.traced_flops,
        compile_seconds=time.monotonic() - started,
        num_parameters=None,
        num_matmul_parameters=None,
        tokens_per_step=None,
        sequence_length=None,
        device_ids=_numbers_of_slices(chosen),
    )
    return {}


def _refused(
    request: Request, refused: OutOfMemory, started: float, arguments: Iterable[Argument], **facts: Any
) -> dict[str, str]:
    """Return the answer for a program that XLA refused because a device has too little memory.

    Args:
        started: when the work began, by `time.monotonic`.
        facts: fields of `Refusal` that are known of the program.
    """
    needed, usable = refused.figures
    taken = Counter[str]()
    for argument in arguments:
        taken[argument.role] += 0 if argument.host else argument.device_bytes
    refusal = Refusal(
        needed_bytes=needed,
        usable_bytes=usable,
        words=refused.words,
        compiler=_compiler_name(request.platform),
        seconds=time.monotonic() - started,
        argument_bytes_by_role=dict(taken.most_common()),
        **facts,
    )
    return {"refused": json.dumps(dataclasses.asdict(refusal))}


def _save(
    request: Request, work: Path, made: Path, accepted: AcceptedOptions, analysis: Any, **facts: Any
) -> None:
    """Save the record of a compiled program with the compiler's reports.

    Args:
        analysis: the sizes that an executable has reported; None where none was made.
        facts: the fields of `Compiled` that neither the request nor a report has.
    """
    begin_phase(work, "saving")
    texts = texts_in(work / "dump")
    record = Compiled(
        schema=SCHEMA,
        name=request.name,
        source=request.source,
        fleet=request.fleet,
        platform=request.platform,
        num_devices=request.num_devices,
        compiler=_compiler_name(request.platform),
        versions=installed_versions(),
        options=accepted.options,
        without_options=accepted.without,
        **_reported(request, work, texts, analysis),
        **facts,
    )
    with writing_cache():
        record.save(made, texts)


def _describe(request: Request, work: Path, made: Path) -> dict[str, str]:
    set_environment()
    axes, knobs = _steps().declared(request)
    return {"axes": json.dumps(axes), "knobs": json.dumps(knobs)}


def _compile(request: Request, work: Path, made: Path) -> dict[str, str]:
    started = time.monotonic()
    if request.rules is not None:
        request.rules.register()
    devices = _devices(request)
    from meshwright.sharding import mesh_of  # imported here: jax reads its settings on import

    from ._deviceless import libraries_of_plugin
    from ._traced import count_traced

    mesh = mesh_of(request.mesh_axes, devices)
    begin_phase(work, "tracing")
    with libraries_of_plugin(request.platform), _surroundings(request, devices):
        step, arguments, keywords, facts, mesh = _program(request, mesh)
        check_mesh_of_slices(mesh, request.fleet)
        traced, lowered = _lowered(request, step, arguments, keywords, devices[0].device_kind)
    key = {}
    if request.function is not None:
        key = {"key": request.key(lowered.as_text())}
        if cached_program(key["key"]) is not None:
            return {"cached": key["key"]}
    begin_phase(work, "counting")
    program, foreign = traced.jaxpr, request.function is not None
    flops = count_traced(program.jaxpr, request.platform, program.consts, by_source=foreign)
    begin_phase(work, "compiling")
    outputs = _outputs(request, work)
    keeps = _keep_executable(request.platform)
    accepted = accepted_options(request.options, _identity())
    options = {**accepted.options, **outputs}
    analysis = None
    if keeps:
        _compile_lowered(lowered, request, options)
    if not are_written(work / "dump"):  # an executable that was kept before is only loaded, without reports
        shutil.rmtree(work / "dump", ignore_errors=True)
        _keep_no_executable()
        try:
            alone = _kernels_alone(request, work, program.jaxpr, devices[0], options)
            analysis = _optimise(
                request, work, lambda: _compile_lowered(lowered, request, options).memory_analysis(), alone
            )
        except OutOfMemory as refused:
            known = {name: facts[name] for name in ("mesh_axes", "num_parameters", "tokens_per_step")}
            took = _arguments(traced, lowered, arguments, request)
            return _refused(request, refused, started, took, **known)
    _save(
        request,
        work,
        made,
        accepted,
        analysis,
        arguments=_arguments(traced, lowered, arguments, request),
        traced_flops=flops,
        compile_seconds=time.monotonic() - started,
        coordinates=device_coordinates(mesh) if request.platform == "tpu" else (),
        device_ids=_numbers_of_slices(mesh.devices.flat),
        **facts,
    )
    return key


def _keep_executable(platform: str) -> bool:
    """Use the folder of `keep_executables` if there is one; return whether it is used.

    The run that follows on the CPU then only loads its step. What described devices would run is not kept.
    """
    folder = Path(os.environ.get(JAX_CACHE_FOLDER, ""))
    keeps = platform == "cpu" and folder.is_relative_to(cache_root())  # else none, or the user's own
    if keeps:
        import jax

        jax.config.update("jax_enable_compilation_cache", True)
    return keeps


def _keep_no_executable() -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks for the setting once
    jax.clear_caches()  # it also keeps executables in memory


def _lowered(
    request: Request, step: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], device_kind: str
) -> tuple[Any, Any]:
    """Return the step traced, and lowered for the request's platform."""
    if request.function is None:
        from meshwright.trainer.step import lowered_step

        traced = step.trace(*arguments)
        lowered = lowered_step(traced, request.platform)
        if (host_memory := _memory_of_hosts(request)) is not None:
            host_memory.name_memories(request, traced, lowered)
        return traced, lowered
    from ._deviceless import devices_of_kind

    with devices_of_kind(device_kind, request.platform):
        return _steps().lower_foreign(request, step, arguments, keywords)


def _identity() -> Any:
    import jax

    return jax.jit(lambda x: x).lower(0.0)


def _devices(request: Request) -> list[Any]:
    """Return the target's devices: described ones, or simulated ones on the CPU."""
    set_environment()
    import jax

    if request.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", request.num_devices)
        return jax.devices()
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(**request.topology).devices)
    except Exception as failed:  # the plugin raises many kinds
        raise CompileError(
            f"the {request.platform} compiler did not accept {request.fleet}: {failed}",
            hint="`meshwright doctor` shows which compile targets this machine has",
        ) from failed


def device_coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    """Return the place of each TPU of the mesh in its slice: x, y, z, and the core on its chip."""
    return tuple((*map(int, device.coords), int(device.core_on_chip)) for device in mesh.devices.flat)


def _numbers_of_slices(devices: Iterable[Any]) -> tuple[int, ...]:
    """Return libtpu's numbers of devices that are in several TPU slices; nothing for any others."""
    listed = list(devices)
    slices = {getattr(device, "slice_index", 0) for device in listed}
    return tuple(int(device.id) for device in listed) if len(slices) > 1 else ()


def check_mesh_of_slices(mesh: Any, fleet: str) -> None:
    """Raise if a mesh on several TPU slices is not in their order, or an axis lies unevenly over them.

    Raises:
        InputError: it is; libtpu's process would end, or the groups would be taken for those of other slices.
    """
    numbers = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    if not any(numbers):
        return  # GPUs, CPUs, or one slice
    if numbers != sorted(numbers):
        shown = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise InputError(
            f"the mesh {shown} of the program goes through the slices of {fleet} more than once",
            hint="order its devices by slice, as jax.devices() lists them: the axis over the slices first",
        )
    from meshwright.config import Layout, check_slices
    from meshwright.hardware import Fleet

    check_slices(Fleet.parse(fleet), Layout(axes=tuple(mesh.shape_tuple)))


def _program(request: Request, mesh: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any], Any]:
    """Return the jitted step, its abstract arguments and keywords, facts from the config, and its mesh."""
    if request.config is not None:
        from meshwright.config import RunConfig
        from meshwright.trainer.step import build_step

        config = RunConfig.model_validate_json(json.dumps(request.config))
        built = build_step(config, mesh)
        is_trained = config.lora.rank is None  # the rules of thumb suppose that every parameter has gradients
        facts = {
            "num_parameters": config.num_frozen_parameters + config.num_trained_parameters,
            "num_matmul_parameters": config.model.num_matmul_parameters if is_trained else None,
            "tokens_per_step": config.batch.tokens_per_step,
            "sequence_length": config.batch.sequence_length if config.model.takes == "sequences" else None,
            "mesh_axes": request.mesh_axes,
        }
        return built.step, (built.state, built.batch), {}, facts, mesh
    unknown: dict[str, Any] = dict.fromkeys(
        ("num_parameters", "num_matmul_parameters", "tokens_per_step", "sequence_length")
    )
    step, arguments, keywords, mesh = _steps().foreign_program(request, mesh)
    return step, arguments, keywords, {**unknown, "mesh_axes": tuple(mesh.shape_tuple)}, mesh


def _surroundings(request: Request, devices: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Return where a user's function is called as on the fleet; our own step needs no such place."""
    if request.function is None:
        return contextlib.nullcontext()
    return _steps().on_the_fleet(request, devices)


def _steps() -> Any:
    """Return the room outside the core that knows steps of users' own, as a module."""
    from meshwright.registry import room

    return room("jax_steps")


def _kernels_alone(
    request: Request, work: Path, program: Any, device: Any, options: Mapping[str, OptionValue]
) -> KernelsAlone | None:
    """Return the Pallas kernels of our own step, which then compile alone; None for programs without ours.

    Experts alone have kernels of ours: other weighings do not load the module.
    """
    model = (request.config or {}).get("model", {})
    if request.platform != "cuda" or not model.get("num_experts") or user_flags():
        return None
    from ._kernels_alone import KernelsAlone

    return KernelsAlone(program, device, options, work / f"{TOOLKIT}-of-kernels")


def _optimise(
    request: Request,
    work: Path,
    compile_program: Callable[[], Any],
    alone: KernelsAlone | None = None,
) -> Any:
    """Compile until the reports on the optimised program are complete; longer where it may be refused late.

    Options of the user's own may concern machine code, so a program with any is compiled to the end.

    Args:
        alone: kernels of the program that compile alone, without which it would have to be waited for.

    Returns:
        What `compile_program` returns, if that was waited for.
    """
    dump = work / "dump"
    if request.platform == "tpu":
        return optimised(compile_program, lambda: is_steady(dump))
    if user_flags():
        return compile_program()
    gate = Gate(work / TOOLKIT) if request.platform == "cuda" else None

    def are_complete() -> bool:
        complete = are_written(dump)
        if not complete and gate is not None and gate.has_kept_waiting():
            gate.open()
        return complete

    def may_fail() -> bool:
        text = program_in(dump)
        may = may_fail_late(text, request.platform)
        if may and alone is not None and not may_fail_late(text, request.platform, (alone.target,)):
            if gate is not None and not alone.has_ended():
                gate.open()  # XLA's threads are few, and those that wait there would hold the kernels up
            may = not alone.compiled()
        if may and gate is not None:
            gate.open()
        return may

    return optimised(compile_program, are_complete, may_fail)


def _reported(request: Request, work: Path, texts: Mapping[str, str], analysis: Any) -> dict[str, Any]:
    """Return the record's fields that the reports make: the fingerprint, and sizes.

    A TPU's dumped text is digested, which is that of no executable. Its sizes are those of the compiler's
    memory analysis, where there is one (docs/dev/adr/0019).
    """
    program, assignment, _ = (texts[name] for name in TEXTS)
    if request.platform != "tpu":
        sizes = bytes_in(assignment)
        return {"fingerprint": fingerprint_of(program_in(work / "dump")), "reported_bytes": sizes}
    names = [name for name in dir(analysis) if name.endswith("_in_bytes")]
    sizes = {name.removesuffix("_in_bytes").removesuffix("_size"): getattr(analysis, name) for name in names}
    return {"fingerprint": fingerprint_of(program), "reported_bytes": sizes}


def _compile_lowered(lowered: Any, request: Request, options: dict[str, OptionValue]) -> Any:
    try:
        return lowered.compile(compiler_options=options)
    except Exception as failed:  # XLA raises RuntimeErrors of many kinds
        check_refused_results(failed)
        raise could_not_compile(f"{request.name} for {request.fleet}", failed) from failed


def _outputs(request: Request, work: Path) -> dict[str, OptionValue]:
    """Return the options that name files of the worker's folder: the compiler's reports, and its inputs."""
    outputs: dict[str, OptionValue] = {**DUMP_OPTIONS, "xla_dump_to": str(work / "dump")}
    if request.platform != "tpu":
        outputs["xla_dump_hlo_as_proto"] = True  # the program as its executable prints it
    if request.platform == "cuda":
        put_assembler(work / TOOLKIT)
        outputs["xla_gpu_cuda_data_dir"] = str(work / TOOLKIT)  # where XLA looks first
    if request.autotune_results:
        results = work / "autotune_results.txtpb"
        results.write_text(request.autotune_results)
        outputs |= loading_results(results)
    return outputs


def _arguments(traced: Any, lowered: Any, arguments: Any, request: Request) -> tuple[Argument, ...]:
    if request.config is None:
        return _steps().arguments_on_mesh(traced, lowered)
    import jax
    import numpy as np

    host_memory = _memory_of_hosts(request)
    names = traced.jaxpr.jaxpr.debug_info.arg_names
    leaves = jax.tree.leaves(arguments)
    assert len(names) == len(leaves), f"{len(names)} argument names for {len(leaves)} arrays"
    found = []
    for name, leaf in zip(names, leaves, strict=True):
        shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", type(leaf)))
        sharding = getattr(leaf, "sharding", None)
        shard = sharding.shard_shape(shape) if sharding is not None else shape
        found.append(
            Argument(
                path=str(name),
                role=_role(str(name)),
                shape=tuple(shape),
                dtype=str(dtype),
                device_bytes=int(np.prod(shard)) * dtype.itemsize,
                replicated=shard == shape,
                host=host_memory is not None and host_memory.is_on_host(str(name), tuple(shape), request),
                moment=_moment(str(name)),
                axes=_axes(sharding, request),
            )
        )
    return tuple(found)


def _memory_of_hosts(request: Request) -> ModuleType | None:
    """Return what tells the hosts' memory apart, for a step of ours that keeps a part of its state there."""
    if (request.config or {}).get("offload", "none") == "none":
        return None
    from . import _host_memory

    return _host_memory


def _axes(sharding: Any, request: Request) -> tuple[str, ...]:
    """Return the mesh axes with more than one device over which a sharding splits an argument."""
    from meshwright.sharding import axes_of

    named = {axis for entry in getattr(sharding, "spec", ()) for axis in axes_of(entry)}
    return tuple(name for name, size in request.mesh_axes if size > 1 and name in named)


def _role(path: str) -> str:
    """Return the role of an argument of our step."""
    top, _, rest = path.partition("[")
    if top == "batch":
        return "batch"
    return ROLES.get(rest.split("]")[0].strip("'"), "step")


def _moment(path: str) -> str:
    """Return Optax's name of a moment ("mu"), preceded by its group of parameters, if any ("muon.mu")."""
    if path.startswith("state['master']"):
        return "master"
    if not path.startswith("state['optimizer']"):
        return ""
    part = re.search(r"\.inner_states\['(\w+)'\]", path)
    fields = [name for name in re.findall(r"\.([A-Za-z_]\w*)", path) if not name.startswith("inner_state")]
    return ".".join([*([part[1]] if part else []), *fields[:1]])


def _compiler_name(platform: str) -> str:
    versions = installed_versions()
    package = {"cuda": "jax-cuda13-pjrt", "tpu": "libtpu", "cpu": "jaxlib"}[platform]
    return f"XLA ({platform}) of {package} {versions[package]}"


NEEDED = (
    "jax",
    "jax.experimental.layout",
    "jax.experimental.topologies",
    "meshwright.trainer.models.transformer",
)
OWN = ("_traced", "_deviceless")
# Packages that import a name when it is first used.
NAMES = (("meshwright.config", "RunConfig"), ("meshwright.trainer.step", "build_step"))
OF_STEPS = ("foreign_program", "lowered_call", "held_as_shapes", "as_the_fleet")


def set_environment() -> None:
    """Set the variables that jax reads when it is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # jax's cached programs come without dumps
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"  # the chips are described, not used


def fork_for_each_request() -> tuple[str, str, int]:
    """Return in a new fork for each request: its two folders, and the process number of this template.

    The template itself never returns: it exits when its standard input ends, and its forks end with it.
    """
    set_environment()
    for module in (*NEEDED, *(f"{__package__}.{name}" for name in OWN)):
        import_module(module)
    for package, name in NAMES:
        getattr(import_module(package), name)
    for name in OF_STEPS:
        getattr(_steps(), name)
    # jax warns because of its threads. It starts them with its first backend, which only the forks make.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    gc.freeze()  # a fork searches nothing that the template imported for garbage
    template, folders = os.getpid(), dict[int, Path]()
    for request in _requests(folders):
        pid = os.fork()
        if not pid:
            _detach(Path(request["work"]))
            os.chdir(request["directory"])
            for name, value in request["environment"].items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            return request["work"], request["made"], template
        folders[pid] = Path(request["work"])
        if not _write(folders[pid] / PID_FILE, pid):
            os.kill(pid, signal.SIGKILL)
    sys.exit(0)


def _requests(folders: dict[int, Path]) -> Iterator[dict[str, Any]]:
    """Yield each request whose caller still waits for it, until the standard input ends.

    Meanwhile write the exit status of each fork that ends into its folder, and remove it from `folders`.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    unread = b""
    while True:
        ready, _, _ = select.select([sys.stdin, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _write_statuses(folders)
        if sys.stdin in ready:
            received = os.read(sys.stdin.fileno(), 65536)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if Path(request["work"]).exists():
                    yield request


def _detach(work: Path) -> None:
    """Lead a session of its own, without the template's signals and input; print into `work`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(os.devnull) as nothing, open(work / STDERR_FILE, "a") as printed:
        os.dup2(nothing.fileno(), 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)


def _write_statuses(folders: dict[int, Path]) -> None:
    """Write the exit status of each fork that has ended into its folder."""
    for pid in tuple(folders):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _write(folders.pop(pid) / STATUS_FILE, os.waitstatus_to_exitcode(status))


def _write(file: Path, number: int) -> bool:
    """Write a number in one step. Return False if the folder is gone, since the caller no longer waits."""
    part = file.with_suffix(".part")
    try:
        part.write_text(str(number))
        part.rename(file)
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    # A worker keeps most of what it makes. Searching it for garbage took a fifth of its time before XLA.
    gc.set_threshold(100_000, 50, 100)
    caller, *folders = sys.argv[1:]
    work_folder, made_folder, caller = (*folders, caller) if folders else fork_for_each_request()
    end_after(lambda: main(Path(work_folder), Path(made_folder), int(caller)))
