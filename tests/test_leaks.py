"""A step that uses a traced value after its function, or in another thread, is refused in words."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
LEAKED: list[jax.Array] = []


@jax.jit
def leaks(x):
    LEAKED.append(x)
    return 2 * x


@pytest.fixture(autouse=True)
def leaked():
    LEAKED.clear()
    leaks.clear_cache()
    leaks(jnp.ones((8, 8)))


def plain(x):
    return (x @ LEAKED[0]).sum()


def through_gradients(x):
    return jax.grad(lambda x: ((x @ x) @ LEAKED[0]).sum())(x)


def in_a_pool(x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: jnp.sin(x)).result().sum()


def in_a_thread(x):
    box = []
    thread = threading.Thread(target=lambda: box.append(jnp.sin(x)))
    thread.start()
    thread.join()
    return box[0].sum()


def in_a_thread_whose_end_nobody_sees(x):
    thread = threading.Thread(target=lambda: jnp.sin(x))
    thread.start()
    thread.join()
    return x.sum()


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["plain", "jitted"])
@pytest.mark.parametrize(
    "step", [plain, through_gradients, in_a_pool, in_a_thread, in_a_thread_whose_end_nobody_sees]
)
def test_a_value_outside_its_trace_is_one_clear_error(step, wrap, capfd):
    before = threading.excepthook
    with pytest.raises(mw.InputError) as refused:
        mw.weigh(mw.jax_step(wrap(step), X), on="8xH100")
    words = (
        f"the call of {step.__name__} uses a traced value (float32[8,8]) outside the function, or the thread"
    )
    assert refused.value.message.startswith(words)
    assert len(refused.value.message.splitlines()) == 1
    assert "_live.py" not in refused.value.message
    if step is plain:
        assert "it is of leaks at" in refused.value.message
    assert "start threads around a step" in refused.value.hint
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is before


def test_a_leaked_value_among_the_arguments_is_refused_too():
    with pytest.raises(mw.InputError, match="uses a traced value"):
        mw.weigh(mw.jax_step(lambda x: x.sum(), LEAKED[0]), on="8xH100")


def test_values_of_a_function_that_is_being_traced_are_no_leaks():
    """A step may be weighed from inside another trace, with what is traced there."""
    found = []

    @jax.jit
    def outer(x):
        found.append(mw.weigh(mw.jax_step(lambda y: (x @ y).sum(), x), on="1xH100").fits)
        return x

    outer(jnp.ones((8, 8)))
    assert found == [True]


def test_other_errors_of_a_thread_are_printed_as_before(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def step(x):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        return x.sum()

    mw.weigh(mw.jax_step(step, X), on="1xH100")
    assert seen == [ZeroDivisionError]


def test_a_leak_in_a_script_is_told_by_its_line_without_jaxs_fourteen(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import jax, jax.numpy as jnp\n"
        "kept = []\n"
        "x = jnp.ones((8, 8))\n"
        "jax.jit(lambda x: kept.append(x) or x)(x)\n"
        "step = jax.jit(jax.grad(lambda w: ((w @ w) @ kept[0]).sum()))\n"
        "step(x)\n"
    )
    with pytest.raises(mw.InputError, match=r"train\.py:6 uses a traced value") as refused:
        mw.weigh(mw.script(str(script)), on="1xH100")
    assert "_shapes.py" not in refused.value.message
