"""Sides of a comparison: scripts, long commands, and commits as their repository keeps them."""

from __future__ import annotations

import subprocess

import meshwright as mw

SCRIPT = """import jax
import jax.numpy as jnp

@jax.jit
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

w, x = jnp.ones((64, 64)), jnp.ones((8, 64))
for _ in range(3):
    w = step(w, x)
"""


def test_a_script_is_a_side_though_its_last_word_is_a_file_of_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = "--on 1xCPU -- python train.py settings.json"
    assert mw.diff(words, words).is_nothing


def test_words_may_be_longer_than_the_name_of_a_file():
    long = "linear --on 1xCPU" + " --set optimizer.learning_rate=0.1" * 10
    assert len(long) > 255
    assert mw.diff(long, long).is_nothing


def test_a_commit_may_have_links_that_leave_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "absolute").symlink_to("/mnt/data")
    (tmp_path / "beside").symlink_to("../beside")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "--quiet"), ("add", "."), (*who, "commit", "--quiet", "--message", "links")):
        subprocess.run(["git", *words], check=True)
    assert mw.diff("@HEAD linear --on 1xCPU", "linear --on 1xCPU").is_nothing
