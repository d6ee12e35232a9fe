import threading

import jax
import jax.numpy as jnp
import pytest

from meshwright.contrib.jax_steps import explaining_leaks, refuse_traced
from meshwright.errors import InputError

kept = []


@jax.jit
def leaking(x):
    kept.append(x[0])
    return x


@pytest.fixture
def leaked():
    kept.clear()
    leaking.clear_cache()
    leaking(jnp.ones(3))
    return kept[0]


@pytest.mark.parametrize("use", [lambda x: jnp.sin(x) + 1, float, bool, lambda x: x.__array__()])
def test_a_value_that_left_its_function_is_explained_however_it_is_used(leaked, use):
    with pytest.raises(InputError, match="outside the function, or the thread") as caught, explaining_leaks():
        use(leaked)
    assert caught.value.hint.startswith("return it from the traced function")


def test_a_value_that_left_its_thread_is_explained():
    found = []

    def traced(x):
        def elsewhere():
            try:
                with explaining_leaks():
                    found.append(jax.jit(lambda y: y + x)(jnp.ones(3)))
            except InputError as error:
                found.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x

    jax.jit(traced)(jnp.ones(3))
    assert isinstance(found[0], InputError)
    assert "the thread" in found[0].message


def asks_for_a_number(x):
    return 1 if x > 0 else 2


@pytest.mark.parametrize("filtering", ["quiet_remove_frames", "remove_frames", "tracebackhide", "off"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_function_that_asks_its_own_value_for_a_number_keeps_jaxs_words(transform, filtering):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", filtering)
    try:
        with pytest.raises(jax.errors.TracerBoolConversionError), explaining_leaks():
            transform(asks_for_a_number)(jnp.ones(2)[0] if transform is jax.jit else jnp.ones(2))
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), explaining_leaks():
        raise ZeroDivisionError


def test_what_is_not_traced_passes():
    refuse_traced(jnp.ones(2), "x", "bytes")
    refuse_traced(3, "x", "bytes")


def test_a_leaked_value_is_refused_too(leaked):
    with pytest.raises(InputError, match="x is a traced value") as caught:
        refuse_traced(leaked, "x", "bytes")
    assert "leaked" in caught.value.hint
