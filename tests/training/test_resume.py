from pathlib import Path

import pytest

from meshwright.checkpoint import Found
from meshwright.checkpoint._manifest import Manifest
from meshwright.config import Layout, load_config
from meshwright.errors import InputError
from meshwright.training._resume import about_of, changes_since

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
