"""Differences between weighings: what moved is found and named, and what did not move is not."""

from __future__ import annotations

import json
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import InputError

MESH = AbstractMesh((8,), ("data",))
WIDTH, ROWS = 1024, 16_384


def spread(*names):
    return NamedSharding(MESH, P(*names))


def step_of(layer, *, reduced=None, metric=False):
    """Return a training step of two products, written in one of several ways."""

    def loss(w, x):
        h = layer(w["a"], x)
        return ((h @ w["b"]) ** 2).mean()

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        if reduced is not None:
            gradient = reduced(gradient)
        new = jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), w, gradient)
        return (new, value, value * 2) if metric else (new, value)

    return step


def product(w, x):
    return jnp.tanh(x @ w)


def renamed_product(weights, rows):
    # A comment, and other names.
    hidden = rows @ weights
    return jnp.tanh(hidden)


def with_dead_code(w, x):
    unused = jnp.sin(x) @ w
    assert unused.shape == x.shape
    return jnp.tanh(x @ w)


def through_a_helper(w, x):
    def multiplied(w, x):
        """Return a product, inside of another function."""
        return x @ w

    return jnp.tanh(multiplied(w, x))


def in_einsum(w, x):
    return jnp.tanh(jnp.einsum("bi,io->bo", x, w))


def product_in_fp32(w, x):
    return jnp.tanh(x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(jnp.bfloat16)


def again(w, x):
    return jax.checkpoint(product)(w, x)


def summed_twice(gradient):
    """Sum the gradient over the devices once more."""
    both = jax.shard_map(lambda g: jax.lax.psum(g * 0.125, "data"), mesh=MESH, in_specs=P(), out_specs=P())
    return jax.tree.map(both, gradient)


@cache
def weighed(name):
    layer, options = {
        "plain": (product, {}),
        "checkpoint": (again, {}),
        "renamed": (renamed_product, {}),
        "logged": (product, {"metric": True}),
        "dead code": (with_dead_code, {}),
        "a helper": (through_a_helper, {}),
        "einsum": (in_einsum, {}),
        "a lambda": (lambda w, x: jnp.tanh(x @ w), {}),
        "a scope": (jax.named_scope("layer")(product), {}),
        "fp32": (product_in_fp32, {}),
        "sharded": (product, {}),
        "twice": (product, {"reduced": summed_twice}),
    }[name]
    over = ("data",) if name == "sharded" else ()
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=spread(*over))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=spread("data"))
    step = jax.jit(step_of(layer, **options), donate_argnums=0)
    return mw.weigh(mw.jax_step(step, {"a": matrix, "b": matrix}, x), on="8xH100")


def difference(before, after):
    return mw.diff(weighed(before), weighed(after))


def closes(made):
    """Return whether the rows of every table sum to the change of its total."""
    return all(
        sum(row.by for row in table.rows) == pytest.approx(table.by, abs=1e-12) for table in made.tables
    )


def line_of(function):
    """Return the source line of the product in a function of this file."""
    return f"test_diff.py:{function.__code__.co_firstlineno + 1}"


def rows_of(made, title):
    return next(table.rows for table in made.tables if table.title == title)


def test_recomputation_that_is_dropped_is_named_with_its_line():
    made = difference("checkpoint", "plain")
    assert closes(made)
    flops = 2 * ROWS * WIDTH**2  # the product that ran twice
    (row,) = rows_of(made, "FLOPs by source line")
    assert (row.by, row.name, row.place) == (-flops, "bf16", line_of(product))
    assert made.sentences[-1].endswith("-34.4 GFLOP of it recomputed")


def test_a_product_in_fp32_is_named_with_its_line_and_both_formats():
    made = difference("plain", "fp32")
    assert closes(made)
    formats = {row.name: row.by for row in rows_of(made, "FLOPs of a step by format")}
    assert formats["fp32"] > 0 > formats["bf16"]
    assert sum(formats.values()) == 0
    by_line = {row.name: row.place for row in rows_of(made, "FLOPs by source line")}
    assert by_line["fp32"] == line_of(product_in_fp32)


def test_a_matrix_on_every_device_is_named_by_its_bytes_and_messages():
    made = difference("sharded", "plain")
    assert closes(made)
    held = {row.name: row for row in rows_of(made, "Memory of a device by category")}
    assert held["w"].after == 2 * WIDTH**2 * 2 > held["w"].before
    assert any(
        "all-gather" in row.name and not row.after for row in rows_of(made, "Bytes that a device sends")
    )


def test_a_second_sum_over_the_devices_is_named_with_its_line():
    made = difference("plain", "twice")
    assert closes(made)
    (count,) = rows_of(made, "Messages of a device")
    assert count.by >= 1
    line = line_of(summed_twice).rpartition(":")[2]
    places = [row.place for row in rows_of(made, "Bytes sent by source line") if row.by > 0]
    assert any(abs(int(place.rpartition(":")[2]) - int(line)) <= 1 for place in places)


@pytest.mark.parametrize(
    "harmless",
    [
        *("renamed", "logged", "einsum", "a scope"),
        *(pytest.param(each, marks=pytest.mark.wide) for each in ("dead code", "a helper", "a lambda")),
    ],
)
def test_a_harmless_change_is_silent(harmless):
    made = difference("plain", harmless)
    assert made.is_nothing
    assert made.line.startswith("nothing moved by more than 0.1 %")
    assert made.tables == ()


def test_lines_that_moved_are_no_change_next_to_one_that_is():
    made = difference("checkpoint", "renamed")
    (row,) = rows_of(made, "FLOPs by source line")
    assert row.by == -2 * ROWS * WIDTH**2


def test_settings_that_differ_are_listed():
    before, after = (
        mw.weigh("gpt2-124m", on="8xH100", overrides={"layer_loop": "keep", "remat": remat})
        for remat in ("dots-attention", "full")
    )
    made = mw.diff(before, after)
    assert made.settings == {"remat": ("dots-attention", "full")}
    assert closes(made)
    assert made.to_dict()["sentences"][0].startswith("-7.34 GiB per device (14.7 GiB to 7.37 GiB, -49.9 %)")
    assert "What differs in the settings" in str(made)
    assert "remat" in made.to_html()


def test_saved_weighings_and_commands_are_sides(tmp_path, meshwright):
    file = tmp_path / "before.json"
    file.write_text(weighed("plain").to_json())
    other = tmp_path / "after.json"
    other.write_text(weighed("checkpoint").to_json())
    done = meshwright("diff", str(file), str(other), "--json", "--check")
    assert done.status == 1
    assert done.json["is_nothing"] is False
    assert meshwright("diff", str(file), str(file), "--check").output.startswith("nothing moved")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "this is not a weighing: config"),
        ("[" * 200, "cannot be read"),
        ('{"config": "a", "layout": "", "fleet": {}, "ledger": {"memory": 5}}', "ledger.memory"),
        ('{"weighings": []}', "it holds 0 weighings"),
        (
            '{"config": "", "layout": "", "fleet": {}, '
            '"prediction": {"step_seconds": {"low": 1, "expected": NaN}, "slices": []}}',
            "step_seconds.expected: Input should be a finite number",
        ),
        (
            '{"config": "", "layout": "", "fleet": {}, "ledger": {"traffic": [], "flops": {}, '
            '"memory": {"reserved_bytes": 1, "by_category": {}, "buffers": [{"num_bytes": "x"}]}}}',
            "ledger.memory.buffers.0.num_bytes: Input should be a valid integer",
        ),
    ],
)
def test_a_file_that_is_no_weighing_is_refused_in_words(text, words, tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        mw.diff(file, file)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("@main", "@HEAD", "names no program"),
        ("linear --on '8xH100", "linear", "cannot read"),
        ("@--output=x linear --on 8xH100", "linear --on 8xH100", "names no commit"),
        ("", "linear --on 8xH100", "is empty"),
        ("absent.json", "absent.json", "No such file"),
    ],
)
def test_sides_that_cannot_be_weighed_are_refused_in_words(before, after, words):
    with pytest.raises(InputError, match=words):
        mw.diff(before, after)


def test_a_fuller_program_that_was_refused_says_so():
    tree = json.loads(weighed("plain").to_json())
    refused = {**tree, "ledger": None, "fits": False, "refusal": {"words": "needs 200 GiB of 79"}}
    from meshwright.contrib.check import difference_of, figures_of

    made = difference_of(figures_of(tree, "before"), figures_of(refused, "after"))
    assert made.line == "after does not fit: the compiler refused it (needs 200 GiB of 79)"
    assert not made.is_nothing


def test_the_page_shows_both_curves_and_both_steps():
    page = difference("checkpoint", "plain").to_html()
    assert page.count("<svg") >= 1
    assert "Memory through the step" in page
    assert "Time of a step" in page
    assert "Memory through the step" not in difference("plain", "plain").to_html()
