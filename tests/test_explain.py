import dataclasses

import pytest

import meshwright as mw
from meshwright.contrib.changes import _weighed_changes as _explain
from meshwright.errors import CompileError
from meshwright.hardware import Link
from meshwright.planning import Suggestion


@pytest.fixture(scope="module")
def small():
    return mw.weigh("cruncher", on="2xCPU", layout="data=2")


def test_each_change_is_what_weighing_it_gives(small):
    changes = mw.explain(small)
    assert {c.arguments for c in changes} == {"--layout fsdp=2", "--set batch.microbatch_sequences=16"}
    for change in changes:
        words = dict(part.split(" ", 1) for part in change.arguments.removeprefix("--").split(" --"))
        again = mw.weigh(
            "cruncher",
            on="2xCPU",
            layout=words.get("layout", "data=2"),
            overrides=[words["set"]] if "set" in words else [],
        )
        assert change.reserved_bytes == again.ledger.memory.reserved_bytes
        assert change.saved_bytes == small.ledger.memory.reserved_bytes - change.reserved_bytes
        assert change.extra_executed_flops == again.ledger.flops.executed - small.ledger.flops.executed
    assert [c.saved_bytes for c in changes] == sorted((c.saved_bytes for c in changes), reverse=True)


def test_what_cannot_be_compiled_says_why_and_keeps_the_others(small, monkeypatch):
    def refuse(*_, layout: str, **__):
        if layout == "fsdp=2":
            raise CompileError("the compiler said no", hint="none")
        return small

    monkeypatch.setattr(_explain, "weigh_unkept", refuse)
    failed = next(c for c in mw.explain(small) if c.failed)
    assert (failed.arguments, failed.failed) == ("--layout fsdp=2", "the compiler said no")
    assert failed.reserved_bytes is None
    assert len(mw.explain(small)) == 2


def test_every_step_of_rematerialisation_is_tried(monkeypatch, small):
    from meshwright.config import load_config

    transformer = dataclasses.replace(small, config=load_config("bytes-nano", ["remat=dots"]))
    monkeypatch.setattr(_explain, "weigh_unkept", lambda *_, **__: small)
    tried = {c.arguments for c in mw.explain(transformer) if "remat" in c.arguments}
    others = ("none", "dots-attention", "alternate-dots", "full")  # and none that repeats some blocks only
    assert tried == {f"--set remat={name}" for name in others}
    listed = dataclasses.replace(small, config=load_config("bytes-nano", ["remat=save:query,key"]))
    effects = {c.effect for c in mw.explain(listed) if "remat" in c.arguments}
    assert "keeps other results for the backward pass (now: save:query,key)" in effects


def test_what_the_prediction_walked_or_bounded_is_compiled(monkeypatch, small):
    """The order that was walked, a larger microbatch, bf16, and half of an axis that the step waits for."""
    from meshwright.config import Layout, load_config
    from meshwright.predict import Slice, Speedup

    overrides = ["batch.sequences=16", "batch.microbatch_sequences=1", "model.embed_dim=64"]
    walked = Speedup(what="", saving_seconds=1.0, certainty="walked whole", change="--layout fsdp=4,data=2")
    waits = Slice(kind="communication", name="all-gather[fsdp]", seconds=1.0, exposed_seconds=1.0)
    slow = dataclasses.replace(
        small,
        config=load_config("bytes-nano", overrides),
        fleet=mw.Fleet.parse("8xH100"),
        layout=Layout.parse("data=2,fsdp=4"),
        prediction=dataclasses.replace(small.prediction, what_helps=(walked,), slices=(waits,)),
    )
    monkeypatch.setattr(_explain, "weigh_unkept", lambda *_, **__: small)
    tried = {c.arguments for c in mw.explain(slow)}
    assert {
        "--layout fsdp=4,data=2",
        "--set batch.microbatch_sequences=2",
        "--set precision=bf16",
        "--layout data=4,fsdp=2",
    } < tried
    assert len(tried) == len(mw.explain(slow))


def test_a_foreign_program_has_nothing_to_change(small):
    foreign = dataclasses.replace(small, config=None, name="mine:step")
    with pytest.raises(mw.InputError, match="mine:step is not a configuration"):
        mw.explain(foreign)


def test_a_change_is_jsons_types(small):
    change = mw.explain(small)[0]
    assert change.to_dict()["arguments"] == change.arguments


def test_changes_are_weighed_on_the_links_that_were_weighed(monkeypatch):
    usual = mw.Fleet.parse("2xCPU")
    chip = dataclasses.replace(usual.chip, inside=Link(name="a wire", bytes_per_second=1e9))
    weighed = mw.weigh("cruncher", on=dataclasses.replace(usual, chip=chip), layout="data=2")
    fleets = []
    monkeypatch.setattr(_explain, "weigh_unkept", lambda *_, on, **__: fleets.append(on) or weighed)
    mw.explain(weighed)
    larger = Suggestion(effect="", fleet="4xCPU")
    fleets.append(_explain._fleet(weighed, larger))
    assert {fleet.inside.name for fleet in fleets} == {"a wire"}
    assert fleets[-1].num_devices == 4
