"""Differences between versions of our own sources: one changed line of a preset's step is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw

pytestmark = pytest.mark.wide  # each weighs with a copy of the sources, by a process of its own
SOURCES = Path(mw.__file__).parent
BLOCK, REMAT = "trainer/models/transformer_block.py", "trainer/models/rematerialisation.py"
LAYOUT, PRODUCTS = "config/_layout.py", "trainer/models/products.py"
GRADIENTS = "trainer/step/_gradients.py"
PRODUCT = "    return multiply(x, weight, num_inputs)\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A git repository with a copy of the sources, committed."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(SOURCES, folder / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "before"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


@pytest.fixture
def changed(repository):
    """Replaces texts of files of the repository, weighs it against its commit, and puts them back."""

    def compared(edits, words):
        for name, before, after in edits:
            text = (repository / "meshwright" / name).read_text()
            assert text.count(before) == 1, (name, before)
            (repository / "meshwright" / name).write_text(text.replace(before, after))
        command = [sys.executable, "-m", "meshwright", "diff", "@HEAD", words, "--json"]
        variables = {**os.environ, "PYTHONPATH": str(repository)}
        done = subprocess.run(
            command, cwd=repository, env=variables, capture_output=True, text=True, check=False
        )
        subprocess.run(["git", "checkout", "-q", "."], cwd=repository, check=True)
        assert done.returncode == 0, done.stderr[-2000:]
        made = json.loads(done.stdout)
        for table in made["tables"]:
            total = table["after"] - table["before"]
            assert sum(row["by"] for row in table["rows"]) == pytest.approx(total, rel=1e-6, abs=1e-9)
        return made

    return compared


def rows_of(made, title):
    return next(table["rows"] for table in made["tables"] if table["title"] == title)


def line_of(file, text):
    lines = (SOURCES / file).read_text().splitlines()
    return f"{Path(file).name}:{1 + next(place for place, line in enumerate(lines) if text in line)}"


def test_a_policy_that_is_dropped_is_named(changed):
    old = "    return jax.checkpoint(block, policy=_policy_that_saves(saved), prevent_cse=not scanned)\n"
    words = "gpt2-124m --on 8xH100 --layout data=8 --set remat=full"
    made = changed([(REMAT, old, "    return block\n")], words)
    memory = {row["name"]: row["by"] for row in rows_of(made, "Memory of a device by category")}
    assert memory["saved_activations"] > 2**30
    flops = rows_of(made, "FLOPs by source line")
    assert all(row["by"] < 0 for row in flops)  # recomputed no more
    assert any("recomputed" in each for each in made["sentences"])


def test_a_matrix_on_every_device_is_named(changed):
    old = '    "embed": ("fsdp", "expert"),\n    "latent"'
    new = '    "embed": (),\n    "latent"'
    made = changed([(LAYOUT, old, new)], "gpt2-124m --on 8xH100 --layout fsdp=8")
    memory = {row["name"]: row["by"] for row in rows_of(made, "Memory of a device by category")}
    kept = 124.4e6 * 4 * 7 / 8  # in fp32: seven parts more of eight
    assert memory["parameters"] == pytest.approx(kept, rel=0.01)
    assert memory["optimizer_state"] == pytest.approx(2 * kept, rel=0.01)


def test_a_product_in_fp32_is_named_by_its_line(changed):
    new = (
        "    return multiply(x.astype(jnp.float32), weight.astype(jnp.float32), num_inputs).astype(x.dtype)\n"
    )
    made = changed([(BLOCK, PRODUCT, new)], "gpt2-124m --on 8xH100 --layout fsdp=8")
    formats = {row["name"]: row["by"] for row in rows_of(made, "FLOPs of a step by format")}
    assert formats["fp32"] > 0 > formats["bf16"]
    places = {row["place"] for row in rows_of(made, "FLOPs by source line") if row["by"] > 0}
    assert line_of(PRODUCTS, "return jax.lax.dot_general(x, matrix, dims.forward(x))") in places


def test_a_second_sum_of_the_gradients_is_named_by_its_line(changed):
    old = "        total = jax.lax.psum(total, left) if left else total\n"
    new = f"{old}        total = jax.lax.psum(total, left) / num_parts if left else total\n"
    made = changed([(GRADIENTS, old, new)], "gpt2-124m --on 8xH100 --layout data=8")
    sent = [row for row in rows_of(made, "Bytes sent by source line") if row["by"] > 0]
    name, number = line_of(GRADIENTS, "total = jax.lax.psum(total, left)").split(":")
    assert sent[0]["place"] in (f"{name}:{number}", f"{name}:{int(number) + 1}")
    assert sum(row["by"] for row in sent) >= 0.9 * 124e6 * 2 * 7 / 8 * 2  # gradients in bf16, on a ring


HARMLESS = [
    (BLOCK, "def projected(x: Array, weight", "# A comment.\n\n\ndef projected(x: Array, weight"),
    (BLOCK, PRODUCT, "    return (lambda a, b: multiply(a, b, num_inputs))(x, weight)\n"),
    (BLOCK, "        return self._project(up,", "        h = up\n        return self._project(h,"),
    (GRADIENTS, "        return total.astype(jnp.float32) / num_parts\n",
     "        unused = jnp.sin(total)\n        assert unused.shape == total.shape\n"
     "        return total.astype(jnp.float32) / num_parts\n"),
    (GRADIENTS, '    with jax.named_scope("replicas"):\n', '    with jax.named_scope("all_replicas"):\n'),
    (REMAT, '    """Wrap `block` in the run', '    """Wrap the `block` in the run'),
    (GRADIENTS, "    def local(parts: Tree) -> Tree:\n", "    def mean_of(parts: Tree) -> Tree:\n"),
    (GRADIENTS, "shard_map(local, mesh=mesh, in_specs=(i", "shard_map(mean_of, mesh=mesh, in_specs=(i"),
]  # fmt: skip


def test_seven_harmless_changes_are_silent(changed):
    made = changed(HARMLESS, "gpt2-124m --on 8xH100 --layout data=8")
    assert made["is_nothing"], made["sentences"]
