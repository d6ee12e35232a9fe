"""What holds in every test: eight simulated CPU devices, no accelerator, a compile cache of its own."""

from __future__ import annotations

import compileall
import gc
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# In the environment, so that it holds in the processes that tests start too. A test marked `gpu` starts
# a process of its own that is given another platform.
os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM then takes half the time or less, here and in the processes that tests start. What is weighed (the
# program, its buffers, its fingerprint) is decided before LLVM and stays the same for every target. Loops on
# the CPU are slower, and their rounding is no different in kind.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Else jax looks for an executable by the name of its folder too, here and in the processes that tests start.
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
# The processes that tests start find the package compiled. They write no bytecode of their own: a test may
# write a program twice in a second, and Python would then run the first one's bytecode for the second. So it
# is here too, once the tests are collected: the next session is spared four seconds of rewriting asserts.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = False
# Each session has a cache of its own. The processes that pytest-xdist starts share that of their parent.
_STARTED_BY_XDIST = "PYTEST_XDIST_WORKER" in os.environ
if not _STARTED_BY_XDIST:
    os.environ["MESHWRIGHT_CACHE_DIR"] = tempfile.mkdtemp(prefix="meshwright-tests-")
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)

# What tests import and what jax keeps are millions of objects, and looking for garbage among them took a
# tenth of the tests' time.
gc.set_threshold(20_000, 10, 10)

# A shell without job control starts background jobs with Ctrl-C ignored; what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402  reads JAX_PLATFORMS when it is imported
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax._src import compiler  # noqa: E402  jax has no public name for the options of all programs
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from tests import kept  # noqa: E402

settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")
jax.config.update("jax_num_cpu_devices", 8)  # layouts are tested without accelerators
jax.config.update("jax_numpy_rank_promotion", "raise")
# Each executable is kept, also for the next session (tests/kept.py). Jax finds it by what the program
# computes: a test that looks at names inside, or at what compiling leaves, is marked `program` and compiles.
SESSION = Path(os.environ["MESHWRIGHT_CACHE_DIR"])
jax.config.update("jax_compilation_cache_dir", str(SESSION / "executables/tests"))
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # where a plugin imported jax before this
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)  # what is quicker is not worth a file

# XLA's older generator of CPU code does the same arithmetic and takes half the time to write it, but fuses a
# little otherwise. jax 0.12 no longer has it, and ends the process that asks for it.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
HAS_QUICK = jax.__version_info__ < (0, 11)
PLACES = jax.config.jax_traceback_in_locations_limit
_compile_options = compiler.get_compile_options


def _quick_options(*arguments: Any, **named: Any) -> Any:
    options = _compile_options(*arguments, **named)
    options.env_option_overrides = [*options.env_option_overrides, *QUICK.items()]
    return options


@pytest.fixture(scope="module", autouse=True)
def only_new_objects_are_searched() -> None:
    """Leave what is there when a file begins out of each search for garbage and for referrers.

    Each run of `train` collects garbage, and asks what refers to its arrays: in a process that has been
    through half of the files, both took seconds. So what is to own an array must be made after this.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def compiled_as_it_pays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let LLVM optimise for files marked `optimised`; generate the code of files marked `quick` quickly.

    The second not by a variable: compile workers and commands would have it too, and the program that is
    weighed is the one that a user's machine runs.
    """
    optimised, quick = (request.node.get_closest_marker(mark) for mark in ("optimised", "quick"))
    with pytest.MonkeyPatch.context() as patch:
        if HAS_QUICK and quick:
            patch.setattr(compiler, "get_compile_options", _quick_options)
        # Numbers do not depend on where an operation was called, and XLA carries each place along.
        jax.config.update("jax_traceback_in_locations_limit", 1 if quick else PLACES)
        jax.config.update("jax_disable_most_optimizations", not optimised)
        yield
        jax.config.update("jax_traceback_in_locations_limit", PLACES)
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def compiled_as_for_a_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile what a test that is marked `program` looks at, in the usual way, and load nothing kept."""
    if not request.node.get_closest_marker("program"):
        yield
        return
    monkeypatch.setattr(compiler, "get_compile_options", _compile_options)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks for the setting once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Give the session what earlier ones compiled and the rates of a processor, once.

    The real probe, which tests/measure tries, takes twelve seconds of a processor. It would run again and
    again: the tests keep the machine busy, and their slow loops make each run disagree with its prediction.
    """
    if _STARTED_BY_XDIST:
        return
    if not session.config.getoption("cacheclear", False):
        kept.bring(SESSION)
    from meshwright.compiler import installed_versions, write_cached
    from meshwright.hardware import Calibration
    from meshwright.measure import calibration_path

    rates = Calibration(
        matmul_flops_per_second={"fp32": 5e10, "bf16": 3e10},
        memory_bytes_per_second=1e9,
        launch_seconds=1e-6,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        source="made up by the tests",
        jaxlib=installed_versions()["jaxlib"],
        measured_again="tests never measure again",
    )
    write_cached(calibration_path("CPU"), rates.to_json())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what is no file of tests, such as users' scripts: `--doctest-modules` would import it."""
    is_module = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_module else None


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = True


@pytest.hookimpl(tryfirst=True)  # before `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test that has another case before it as `further`: `make test-again` leaves those out."""
    seen: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        # A case that runs only on request is no first case.
        if any(item.get_closest_marker(mark) for mark in ("wide", "long", "gpu")):
            continue
        if test in seen:
            item.add_marker("further")
        seen.add(test)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Compile workers are forks of one process, where a test changes neither environment nor directory."""
    from meshwright.compiler import warm_workers

    with warm_workers():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Take back the variables that training and imports set: with others, no compile worker is a fork.

    This takes back too what a fixture of a module sets, after the first test that asks for it.
    """
    before = dict(os.environ)
    try:
        return (yield)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture
def mesh() -> Callable[..., Mesh]:
    """A mesh of axes over as many simulated devices as they need."""
    from meshwright.sharding import mesh_of

    def make(**axes: int) -> Mesh:
        sizes = tuple(axes.items()) or (("data", 1),)
        return mesh_of(sizes, jax.devices()[: math.prod(size for _, size in sizes)])

    return make


def pytest_unconfigure() -> None:
    if not _STARTED_BY_XDIST:
        kept.keep(SESSION)
        shutil.rmtree(SESSION, ignore_errors=True)


@pytest.fixture
def at_once() -> Callable[[Callable[[], Any]], list[Any]]:
    """What a function returns in each of eight threads."""

    def run(fn: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return [future.result() for future in [pool.submit(fn) for _ in range(8)]]

    return run
