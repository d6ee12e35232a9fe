import sys
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
from meshwright.config import load_config

pytest.importorskip("torch", reason="requirements/torch-py311.txt pins the release")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _step_classes import CLASSES, our_seconds_by_class, torch_seconds_by_class
from train_cpu import Ours, Theirs


@pytest.mark.wide
def test_traced_steps_of_both_have_every_class_of_work():
    config = load_config("bytes-nano", ["precision=fp32", "data.source=synthetic"])
    tokens = np.random.default_rng(0).integers(0, 256, (8, config.batch.sequence_length + 1))
    ours = Ours(config, tokens)
    theirs = Theirs(config.model, tokens, ours.state["parameters"])
    assert ours.run() == pytest.approx(theirs.run(), abs=1e-4)
    weighing = mw.weigh(config, on="1xCPU")
    for found in (our_seconds_by_class(weighing, ours.run), torch_seconds_by_class(theirs.run)):
        assert tuple(found) == CLASSES
        assert all(seconds > 0 for seconds in found.values())
