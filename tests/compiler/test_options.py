"""Compiler options: each purpose is spelled as the installed XLA spells it, or reported as missing."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.compiler import accepted_options, requested_options
from meshwright.compiler._record import OPTIONS, CompilerOption


@pytest.fixture
def identity():
    return jax.jit(lambda x: x).lower(0.0)


def test_programs_that_communicate_ask_to_hide_it():
    over_links = ("latency hiding", "pipelined all-reduces", "all-reduces by NCCL")
    assert requested_options("cuda", 8) == ("products by cuBLAS", *over_links)
    assert requested_options("cuda", 1) == ("products by cuBLAS",)
    assert requested_options("cuda", 1, eight_bits=True) == ("products by cuBLAS", "products apart")
    assert requested_options("cpu", 8) == requested_options("tpu", 8) == ()


def test_a_deterministic_program_asks_for_no_operation_that_adds_in_undefined_order(identity):
    asked = accepted_options(requested_options("cuda", 1, deterministic=True), identity).options
    assert asked["xla_gpu_exclude_nondeterministic_ops"] is True
    assert set(requested_options("cuda", 8, deterministic=True)) > set(requested_options("cuda", 8))
    assert requested_options("cpu", 8, deterministic=True) == ()


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


def test_an_error_that_is_not_about_the_option_is_not_taken_for_a_refusal():
    class Broken:
        def compile(self, *, compiler_options):
            raise jax.errors.JaxRuntimeError("INTERNAL: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        accepted_options(requested_options("cuda", 8), Broken())
