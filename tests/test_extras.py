"""What an extra brings: what is said, and still done, where it is not installed."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import cuda_versions
from jax.experimental import rnn

import meshwright as mw
from meshwright.contrib import jax_steps
from meshwright.extras import PURPOSES, how_to_install

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
FOR_WORK_ON_IT = {"dev", "docs", "in-place"}
PLUGIN = pytest.mark.skipif(cuda_versions is None, reason="JAX's plugin for NVIDIA is not installed")


def test_each_extra_has_a_purpose():
    assert PROJECT["optional-dependencies"].keys() == PURPOSES.keys() | FOR_WORK_ON_IT


def test_training_names_all_that_it_lacks_before_it_does_anything(monkeypatch, tmp_path):
    for name in ("tensorstore", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(mw.InputError) as refused:
        mw.train("linear", on="1xCPU", steps=1, folder=tmp_path / "run")
    assert refused.value.message == "training needs tensorstore and tensorboardX, which are not installed"
    assert refused.value.hint == how_to_install("train")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("package", "module"),
    [("tensorstore", "trainer.checkpoint._stored_arrays"), ("tensorboardX", "trainer.loop._recording")],
)
def test_what_reads_or_writes_a_run_says_what_it_lacks(package, module, monkeypatch):
    importlib.import_module(f"meshwright.{module}")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"meshwright.{module}")
    with pytest.raises(mw.InputError, match=f"needs {package}, which is not installed") as refused:
        importlib.import_module(f"meshwright.{module}")
    assert refused.value.hint == how_to_install("train")


def test_a_page_without_matplotlib_has_words_in_place_of_curves(monkeypatch):
    weighing = mw.weigh("linear", on="1xH100")
    drawn = weighing.to_html()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = weighing.to_html()
    assert "Not drawn" not in drawn
    assert "Not drawn: " in page
    assert "matplotlib, which is not installed; in your clone" in page
    assert page.count("<table") == drawn.count("<table")


HEADS = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)


def attention(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


@PLUGIN
def test_attention_by_cudnn_is_the_same_program_with_and_without_cudnn(monkeypatch):
    def absent() -> int:
        raise RuntimeError("cuDNN not found.")

    texts = []
    for answer in (absent, lambda: 92800):
        monkeypatch.setattr(cuda_versions, "cudnn_get_version", answer)
        texts.append(
            jax_steps.lowered_call(attention, (HEADS,) * 3, {}, "cuda", "NVIDIA H100 80GB HBM3").text
        )
        assert cuda_versions.cudnn_get_version is answer, "only a weighing is answered"
    assert texts[0] == texts[1]
    assert "cudnn" in texts[0]


@PLUGIN
def test_what_only_a_card_can_answer_is_refused_with_what_to_do():
    def layer(rows):
        state, lengths = jnp.zeros((1, 2, 8)), jnp.full((2,), 4)
        weights = jnp.zeros((rnn.get_num_params_in_lstm(8, 8, 1, False),))
        return rnn.lstm(rows, state, state, weights, lengths, 8, 8, 1, 0.0, False)

    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("a card answers")
    with pytest.raises(mw.InputError, match="dnnCreate") as refused:
        mw.weigh(mw.jax_step(layer, jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)), on="1xH100")
    assert "jax.lax.scan" in refused.value.hint
    assert how_to_install("cuda") in refused.value.hint
