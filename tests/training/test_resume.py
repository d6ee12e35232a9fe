from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint import Found
from meshwright.checkpoint._manifest import Manifest
from meshwright.config import Layout, load_config
from meshwright.errors import InputError
from meshwright.training._resume import about_complaint, about_of, changes_since

ONE = Layout.parse("data=1")


def found(config, layout):
    about = about_of(config, layout)
    manifest = Manifest(step=20, about=about, files=(), arrays=())
    return Found(step=20, folder=Path("run/checkpoints/20"), about=about, rejected=(), manifest=manifest)


def test_what_has_changed_is_told_and_what_concerns_no_training_is_not():
    was = load_config("bytes-nano")
    now = load_config("bytes-nano", ["optimizer.learning_rate=0.5", "steps=7", "faults.bad_step=skip"])
    said = changes_since(found(was, ONE), now, Layout.parse("fsdp=8"))
    rate = was.optimizer.learning_rate
    assert said == [f"optimizer.learning_rate: {rate} -> 0.5", "layout: data=1 -> fsdp=8"]
    assert changes_since(found(was, ONE), was, ONE) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.num_layers=3", "model.num_layers"),
        ("seed=5", "seed"),
        ("batch.sequences=16", "batch.sequences"),
        ("optimizer.kind=sgd", "optimizer.kind"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(override, key):
    was, now = load_config("bytes-nano"), load_config("bytes-nano", [override])
    with pytest.raises(InputError, match=rf"{key} is .*, and the checkpoint of step 20 in .* is of a run"):
        changes_since(found(was, ONE), now, ONE)


def test_a_token_file_that_was_replaced_or_cut_is_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(256, dtype=np.uint16).repeat(4).tofile(path)
    config = load_config("bytes-nano", ["data.source=tokens", f"data.path={path}", "data.dtype=uint16"])
    made = found(config, ONE)
    assert changes_since(made, config, ONE) == []
    np.arange(256, dtype=np.uint16).repeat(3).tofile(path)
    with pytest.raises(InputError, match=r"is not what the checkpoint of step 20 .* 1536 bytes") as told:
        changes_since(made, config, ONE)
    assert "bring it back as it was" in told.value.hint
    np.zeros(1024, np.uint16).tofile(path)
    with pytest.raises(InputError, match="2048 bytes are as many as before, and not the same"):
        changes_since(made, config, ONE)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ""),
        ({"data": None}, ""),
        ({"config": None}, "config"),
        ({"layout": 3}, "layout"),
        ({"data_offset": -1}, "data_offset"),
        ({"data_offset": None}, "data_offset"),
        ({"data": {"name": "x"}}, "data"),
    ],
)
def test_what_a_checkpoint_says_of_its_run_is_checked_before_it_is_used(change, wrong):
    about = {**about_of(load_config("bytes-nano"), ONE), "data_offset": 0, **change}
    said = about_complaint(about)
    assert said == (f"manifest.json is not as a run writes it: about.{wrong}" if wrong else "")
