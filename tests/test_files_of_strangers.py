"""Files of strangers, made from the number of their case: each is read, or refused in words.

Configs, traces, weights, tokenizers with templates, data, and files of the cache: `tests/hostile.py` makes
them.
"""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.contrib.texts import _templates

from .hostile import KINDS, outcome_of

FEW = {"template": 8, "trace": 25, "data": 25, "run": 20}


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "times", [1, pytest.param(10, marks=pytest.mark.wide), pytest.param(40, marks=pytest.mark.long)]
)
def test_a_strangers_file_is_read_or_refused_in_words(kind, times, tmp_path, monkeypatch):
    for package in {"template": ("tokenizers", "jinja2"), "data": ("pyarrow",)}.get(kind, ()):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr(_templates, "CPU_SECONDS", 0.5)
    cases = times * FEW.get(kind, 100)
    found = [outcome_of(kind, number, tmp_path / "files") for number in range(cases)]
    faults = [f"{kind} {number}: {words}" for number, (how, words) in enumerate(found) if how == "fault"]
    assert not faults, f"{len(faults)} of {cases}:\n" + "\n".join(faults[:10])
    assert Counter(how for how, _ in found)["words"] >= cases / 20
