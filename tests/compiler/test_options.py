"""Compiler options: each purpose is spelled as the installed XLA spells it, or reported as missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.compiler import (
    OPTIONS,
    CompilerOption,
    Request,
    accepted_options,
    read_text,
    requested_options,
)

ONE, FSDP, FSDP_TENSOR = [("data", 1)], [("fsdp", 8)], [("fsdp", 2), ("tensor", 8)]


@pytest.fixture
def identity():
    return jax.jit(lambda x: x).lower(0.0)


def test_programs_that_communicate_ask_to_hide_it():
    over_links = ("latency hiding", "pipelined all-reduces", "all-reduces by NCCL")
    alone = ("products by cuBLAS", "fusions untimed")
    assert requested_options("cuda", FSDP) == (*alone, *over_links)
    assert requested_options("cuda", [("data", 2), *FSDP, ("tensor", 1)]) == (*alone, *over_links)
    assert requested_options("cuda", FSDP_TENSOR) == (*alone, *over_links, "two messages at once")
    assert requested_options("cuda", ONE) == alone
    assert requested_options("cuda", ONE, eight_bits=True) == (*alone, "products apart")
    assert requested_options("cpu", FSDP_TENSOR) == requested_options("tpu", FSDP_TENSOR) == ()


# By its name: jax 0.12 starts fusions in this way too.
COLLECTIVE = re.compile(r"%(?:all-gather|all-reduce|reduce-scatter|collective-permute)-(start|done)[.\d]* = ")


def most_in_flight(text):
    """The most collectives that have started and not ended, anywhere in a scheduled program."""
    most = now = 0
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            now = 0
        if found := COLLECTIVE.search(line):
            now += 1 if found[1] == "start" else -1
            most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("layout", "most"), [pytest.param("fsdp=16", 1, marks=pytest.mark.wide), ("fsdp=2,tensor=8", 2)]
)
def test_messages_over_two_axes_are_under_way_at_once(layout, most):
    sizes = ("model.num_heads=8", "model.num_kv_heads=8", "model.embed_dim=256")
    more = ("batch.sequences=32", "data.source=synthetic", "precision=bf16")
    weighed = mw.weigh("bytes-nano", on="16xH100", layout=layout, overrides=(*sizes, *more))
    assert most_in_flight(read_text(weighed.folder, "program.hlo.txt")) == most


def test_a_deterministic_program_asks_for_no_operation_that_adds_in_undefined_order(identity):
    asked = accepted_options(requested_options("cuda", ONE, deterministic=True), identity).options
    assert asked["xla_gpu_exclude_nondeterministic_ops"] is True
    assert set(requested_options("cuda", FSDP, deterministic=True)) > set(requested_options("cuda", FSDP))
    assert requested_options("cpu", FSDP, deterministic=True) == ()


def test_the_installed_compiler_takes_every_option_that_it_is_said_to_accept(identity):
    """One release spells pipelined all-reduces one way, the next another; each lock's XLA must know one."""
    accepted = accepted_options(OPTIONS, identity)
    assert accepted.without == ()
    names = {name for name, _ in OPTIONS["pipelined all-reduces"].spellings}
    assert len(names & accepted.options.keys()) == 1
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=accepted.options)


def test_an_option_that_the_compiler_lacks_is_left_out_and_its_consequence_said(identity, monkeypatch):
    unknown, badly_valued = ("xla_gpu_of_another_century", True), ("xla_gpu_deterministic_ops", "certainly")
    monkeypatch.setitem(
        OPTIONS,
        "invented",
        CompilerOption(spellings=(unknown, badly_valued), without="steps are slower"),
    )
    monkeypatch.setitem(OPTIONS, "harmless", CompilerOption(spellings=(unknown,), without=""))
    accepted = accepted_options(("invented", "harmless"), identity)
    assert accepted.options == {}
    assert accepted.without == (
        "this release of XLA has no option xla_gpu_of_another_century or xla_gpu_deterministic_ops: "
        "steps are slower",
    )


def test_an_option_that_the_user_sets_in_xla_flags_is_left_to_them_and_said(identity, monkeypatch):
    name = "xla_gpu_experimental_parallel_collective_overlap_limit"
    purposes = requested_options("cuda", FSDP_TENSOR)
    assert accepted_options(purposes, identity).options[name] == "2"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 --{name}=1")
    accepted = accepted_options(purposes, identity)
    assert name not in accepted.options
    assert accepted.without == (f"XLA_FLAGS sets {name} to 1",)


def test_a_program_under_other_xla_flags_is_another_entry_of_the_cache(monkeypatch):
    sizes = {"num_devices": 1, "mesh_axes": (("data", 1),), "topology": {}, "options": ()}
    request = Request(name="a", fleet="1xCPU", platform="cpu", source="target compiler", **sizes)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    one = request.key()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_dump_to=here")
    assert request.key() == one, "neither changes a program"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math")
    assert request.key() != one


def test_an_error_that_is_not_about_the_option_is_not_taken_for_a_refusal():
    class Broken:
        def compile(self, *, compiler_options):
            raise jax.errors.JaxRuntimeError("INTERNAL: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        accepted_options(requested_options("cuda", FSDP), Broken())


# Compile a preset's step by a file of results, and print the error.
COMPILE_BY = """
import sys
import jax
from jax.experimental import topologies
from meshwright import load
from meshwright.config import Layout
from meshwright.hardware import Fleet, topology_arguments
from meshwright.sharding import mesh_of
from meshwright.trainer.step import build_step

config, file = load(sys.argv[1]), sys.argv[2]
devices = topologies.get_topology_desc(**topology_arguments(Fleet.parse("1xH100"))).devices
built = build_step(config, mesh_of(Layout.parse("data=1").axes, devices))
lowered = built.step.trace(built.state, built.batch).lower(lowering_platforms=("cuda",))
options = {"xla_gpu_load_autotune_results_from": file, "xla_gpu_require_complete_aot_autotune_results": True}
if jax.__version_info__ >= (0, 11):
    options["xla_gpu_use_new_autotune_cache_format"] = False
try:
    lowered.compile(compiler_options=options)
except jax.errors.JaxRuntimeError as incomplete:
    print(incomplete)
"""
LOGS_KEYS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "autotuner_cache=10"}
TRITON = "triton {{ block_m: 64 block_n: {} block_k: 16 split_k: 1 num_stages: 2 num_warps: 4 num_ctas: 1 }}"
CUBLAS = "gemm { algorithm: 3 }"
# "2\\000" is an empty `native_emitter`: what XLA does without a result.
NO_CHOICE = """other {
  name: "NATIVE_EMITTER"
  config { type_url: "type.googleapis.com/xla.autotuner.BackendConfig" value: "2\\000" } }"""


@pytest.fixture(scope="module")
def results_with(tmp_path_factory):
    """Write a file of results for the step of `cruncher` on one H100, with one kernel for all products."""
    folder = tmp_path_factory.mktemp("results")
    empty = folder / "empty.txtpb"
    empty.write_text("version: 3\n")
    script = [sys.executable, "-c", COMPILE_BY, "cruncher", str(empty)]
    log = subprocess.run(script, env={**os.environ, **LOGS_KEYS}, capture_output=True, text=True, check=True)
    keys = re.findall(
        r"cache miss: key = <key model='([^']*)', hlo='(.*?)', version=(\d+)>", log.stderr, re.S
    )
    assert keys, log.stderr[-2000:]

    def write(name, product):
        entries = [
            f"results {{ device: {quoted(device)} hlo: {quoted(hlo)} version: {version} "
            f"result {{ {product if ' dot(' in hlo else NO_CHOICE} }} }}"
            for device, hlo, version in keys
        ]
        path = folder / name
        path.write_text("\n".join(["version: 3", *entries]))
        return str(path)

    return write


def quoted(text):
    """Return a text as a string of a text-format protocol buffer."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def weigh_by(results, what="cruncher", **others):
    return mw.weigh(what, on="1xH100", overrides={"autotune_results": str(results), **others})


def test_a_step_is_compiled_with_the_kernels_of_a_file(results_with, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    plain = mw.weigh("cruncher", on="1xH100")
    wide, cublas = results_with("wide.txtpb", TRITON.format(32)), results_with("cublas.txtpb", CUBLAS)
    tiled, called = weigh_by(wide), weigh_by(cublas)
    texts = [read_text(made.folder, "program.hlo.txt") for made in (plain, tiled, called)]
    assert '"output_tiles":[{"sizes":["64","32"]}]' in texts[1]
    assert ["__cublas" in text for text in texts] == [True, False, True]
    assert ['"selected_algorithm":"3"' in text for text in texts] == [False, False, True]
    assert plain.ledger.flops.executed == tiled.ledger.flops.executed == called.ledger.flops.executed
    assert tiled.prediction.step_seconds.expected > 0

    again = weigh_by(results_with("renamed.pbtxt", TRITON.format(32)))
    other = weigh_by(results_with("wide.txtpb", TRITON.format(64)))  # the same name, another content
    assert again.compiled.fingerprint == tiled.compiled.fingerprint != other.compiled.fingerprint
    assert (again.cached, other.cached) == (True, False)


def test_a_file_that_lacks_a_result_is_refused_with_its_number_and_a_way_on(tmp_path):
    lacking = tmp_path / "results.txtpb"
    lacking.write_text("version: 3\n")
    with pytest.raises(
        mw.InputError, match=r"no result for 3 of 3 kernels of this step, as for %"
    ) as refused:
        weigh_by(lacking)
    assert "`meshwright train` on that GPU writes it" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"version: 3\nfrom another century", "XLA cannot read the file"),
        (b"  \n", "is an empty file"),
        (b"\xff\xfe\x00", "it is not text"),
        (None, "No such file"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(text, words, tmp_path):
    file = tmp_path / "results.txtpb"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(mw.InputError, match=words):
        weigh_by(file)


def test_results_are_of_one_step_on_nvidias_gpus(tmp_path):
    file = tmp_path / "results.txtpb"
    file.write_text("version: 3\n")
    given = {"autotune_results": str(file)}
    with pytest.raises(mw.InputError, match="a plan compares many"):
        mw.plan("cruncher", on="1xH100", overrides=given)
    with pytest.raises(mw.InputError, match="compiled for a CPU"):
        mw.weigh("cruncher", on="1xCPU", overrides=given)
    with pytest.raises(mw.InputError, match="compiled for a CPU"):
        mw.train("cruncher", on="1xCPU", overrides=given, steps=1, folder=tmp_path / "run")
    with pytest.raises(mw.InputError, match="chooses no kernel by timing"):
        weigh_by(file, deterministic=True)
    with pytest.raises(mw.InputError, match=r"ends in \.txtpb"):
        weigh_by(tmp_path / "results.bin")


def test_results_are_found_though_the_gpu_described_itself_with_other_libraries(results_with, tmp_path):
    mine = Path(results_with("mine.txtpb", CUBLAS)).read_text()
    described = "Memory bandwidth: 3352 GB/s, L2 cache: 50 MB, DNN version: 9.10.0"
    assert described in mine
    theirs = tmp_path / "theirs.txtpb"
    theirs.write_text(
        mine.replace(described, "Memory bandwidth: 3359 GB/s, L2 cache: 50 MB, DNN version: 9.19.1")
    )
    assert '"selected_algorithm":"3"' in read_text(weigh_by(theirs).folder, "program.hlo.txt")
    theirs.write_text(mine.replace("3352 GB/s", "4814 GB/s"))  # an H200
    with pytest.raises(mw.InputError, match=r"is of another GPU: CUDA: 9.0, Cores: 132, .* 4814 GB/s"):
        weigh_by(theirs)
    theirs.write_text('entries { key { target { device: "ed0e" hlo_fingerprint: "01" } } }')
    with pytest.raises(mw.InputError, match="has XLA's new format"):
        weigh_by(theirs)
