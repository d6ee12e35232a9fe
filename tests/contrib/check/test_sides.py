"""Sides of a comparison: scripts, long commands, and commits as their repository keeps them."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


UV = f"""#!/bin/sh
# Takes the place of uv: makes an environment that is this one, and only one at a time.
mkdir "$0.busy" || exit 1
sleep 0.2
if [ "$1" = venv ]; then
    for folder; do :; done
    mkdir -p "$folder/bin" && printf '#!/bin/sh\\nexec {sys.executable} "$@"\\n' > "$folder/bin/python"
    chmod +x "$folder/bin/python"
fi
rmdir "$0.busy"
"""


@pytest.mark.once
def test_two_sides_with_the_same_packages_share_one_environment(tmp_path, monkeypatch):
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    made = mw.diff("linear --on 1xCPU --with a==1", "linear --on 1xCPU --with a==1 --set steps=7")
    assert made.settings == {"steps": ("100", "7")}
    assert len([*(tmp_path / "cache/environments").iterdir()]) == 1
