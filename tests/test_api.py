"""The Python face: whole weighings against figures worked out by hand."""

import dataclasses
import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
import meshwright.trainer.checkpoint
from meshwright.config import TransformerModel, load_config
from meshwright.extras import how_to_install

EXAMPLES = Path(__file__).parent.parent / "examples"


def by_hand(config) -> int:
    """Model FLOPs of a Transformer's step: 6 per matmul parameter and token, and causal attention.

    Attention's scores and weighted sum are 2 x 2 x sequence x heads x head_dim a token forward, twice that
    backward, and half of it all is needed: 6 x sequence x heads x head_dim.
    """
    model, batch = config.model, config.batch
    assert isinstance(model, TransformerModel)
    attention = 6 * batch.sequence_length * model.num_heads * model.head_dim * model.num_layers
    return batch.tokens_per_step * (6 * model.num_matmul_parameters + attention)


@pytest.fixture(scope="module")
def largest():
    return mw.weigh("llama3-405b", on="512xH100", layout="fsdp=64,tensor=8")


@pytest.fixture(scope="module")
def small():
    return mw.weigh("bytes-nano", on="8xH100", layout="data=2,fsdp=2,tensor=2")


def test_405b_takes_the_arguments_that_its_sharded_parameters_and_moments_come_to(largest):
    by_hand_bytes = 3 * 4 * 405_853_388_800 / 512  # parameter and two moments in fp32, over all devices
    categories = largest.ledger.memory.by_category
    assert categories["parameters"] + categories["optimizer_state"] == pytest.approx(by_hand_bytes, rel=1e-3)
    assert largest.compiled.reported_bytes["argument"] == pytest.approx(by_hand_bytes, rel=1e-3)
    assert largest.fits is True


def test_405b_has_the_model_flops_of_the_closed_form(largest):
    assert largest.config is not None
    assert largest.ledger.flops.model == pytest.approx(by_hand(largest.config), rel=1e-12)


def test_405b_moves_its_weights_twice_and_its_gradients_once_per_microbatch(largest):
    """Over fsdp, bf16: gathered for the forward and the backward pass, and gradients scattered."""
    sent = {(c.kind, c.axes): c.wire_bytes for c in largest.ledger.traffic}
    microbatches, shard = 2048 // 64, 2 * 405_853_388_800 // 8
    once = microbatches * shard * 63 / 64
    assert sent["all-gather", ("fsdp",)] == pytest.approx(2 * once, rel=0.02)
    assert sent["reduce-scatter", ("fsdp",)] == pytest.approx(once, rel=0.02)


def test_gpt3_over_300_billion_tokens_comes_to_the_published_flops():
    """3.14e23, Brown et al. 2020, table D.1. The weighed model FLOPs equal `by_hand` (above)."""
    config = load_config("gpt3-175b")
    flops = by_hand(config) / config.batch.tokens_per_step * 300e9
    assert flops == pytest.approx(3.14e23, rel=0.02)


def test_devices_that_are_added_add_their_batch_and_the_rate_follows():
    said = ["batch.sequences_per_replica=4", "batch.base_sequences=8", "schedule.scale=sqrt"]
    one, two = (mw.weigh("cruncher", on=on, layout="fsdp=-1", overrides=said) for on in ("2xCPU", "8xCPU"))
    assert (one.compiled.tokens_per_step, two.compiled.tokens_per_step) == (8, 32)
    assert one.config is not None
    assert two.config is not None
    assert two.config.peak_learning_rate == pytest.approx(2 * one.config.peak_learning_rate)
    again = mw.weigh(two.config, on="8xCPU")
    assert again.cached


def test_the_categories_sum_to_what_is_reserved(small, largest):
    for weighed in (small, largest):
        memory = weighed.ledger.memory
        assert sum(memory.by_category.values()) == memory.reserved_bytes
        assert sum(memory.by_format.values()) == memory.reserved_bytes


def test_a_step_in_fp32_keeps_no_narrow_number_and_one_in_bf16_does(small, largest):
    assert small.config.precision == "fp32"
    formats = set(small.ledger.memory.by_format)
    assert {"fp32", "int32"} <= formats <= {"fp32", "int32", "uint32", "bool", "unused", "int8"}
    of_int8 = {b.category for b in small.ledger.memory.buffers if b.format == "int8"}
    assert of_int8 <= {"workspace"}  # of cuBLAS
    assert set(largest.ledger.memory.by_category_and_format["saved_activations"]) >= {"bf16"}


def test_the_json_has_the_names_that_others_build_on(small):
    found = json.loads(json.dumps(small.to_dict()))
    assert found["schema"] == 8
    fleet = found["fleet"]
    assert (fleet["name"], fleet["chip"], fleet["num_devices"]) == ("8xH100", "H100", 8)
    assert fleet["inside_bytes_per_second"] > fleet["between_bytes_per_second"] > 0
    assert (found["config"], found["layout"]) == ("bytes-nano", "data=2,fsdp=2,tensor=2")
    assert (found["sequence_length"], found["tokens_per_step"]) == (64, 512)
    assert found["source"] == "target compiler"
    assert found["fits"] is True
    memory = found["ledger"]["memory"]
    assert {"reserved_bytes", "peak_bytes", "allowance_bytes", "usable_bytes", "by_category"} <= set(memory)
    assert {"model", "executed", "recomputed", "by_phase"} <= set(found["ledger"]["flops"])
    one = found["ledger"]["traffic"][0]
    assert {"kind", "axes", "count", "payload_bytes", "wire_bytes"} <= set(one)
    assert found["ledger"]["unpriced"] == []
    prediction = found["prediction"]
    assert set(prediction["step_seconds"]) == {"low", "expected", "high"}
    assert {"tokens_per_second_per_device", "mfu", "hfu"} <= set(prediction)
    assert {"seconds", "cached", "compiler", "options"} <= set(found["compile"])


def test_a_second_weighing_comes_from_the_cache_and_says_so(small):
    again = mw.weigh("bytes-nano", on="8xH100", layout="data=2,fsdp=2,tensor=2")
    assert again.cached
    assert again.compiled == small.compiled


def test_what_the_program_does_not_see_compiles_nothing_anew(small):
    beside = ["checkpoint.every_steps=7", "faults.bad_step=skip", "evaluation.batches=3"]
    assert mw.weigh("bytes-nano", on="8xH100", layout="data=2,fsdp=2,tensor=2", overrides=beside).cached


def test_a_config_record_weighs_as_its_preset_does(small):
    config = load_config("bytes-nano", ["layout=data=2,fsdp=2,tensor=2"])
    assert mw.weigh(config, on="8xH100").compiled.fingerprint == small.compiled.fingerprint


def test_a_config_record_takes_overrides_and_checks_them(small):
    config = load_config("bytes-nano", ["layout=data=2,fsdp=2,tensor=2", "seed=3"])
    assert mw.weigh(config, on="8xH100", overrides=["seed=0"]).compiled == small.compiled
    with pytest.raises(mw.InputError, match="stepz"):
        mw.weigh(load_config("bytes-nano"), on="1xCPU", overrides=["stepz=3"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"on": 8}, "int 8 is no fleet"),
        ({"on": ["8xH100"]}, "list ['8xH100'] is no fleet"),
        ({"overrides": 3}, "overrides = 3 are neither a dict nor texts"),
        ({"overrides": [3]}, "overrides = [3] are neither a dict nor texts"),
        ({"overrides": {3: 1}}, "override 3 is not section.key"),
        ({"run": "15T"}, "run = '15T' is no length of a run"),
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused_with_how_to_write_it(changed, words):
    given = {"on": "8xCPU", **changed}
    with pytest.raises(mw.InputError, match=re.escape(words)):
        mw.weigh("bytes-nano", **given)
    with pytest.raises(mw.InputError, match=re.escape(words)):
        mw.plan("bytes-nano", **given)


@pytest.mark.parametrize("verb", [mw.load, mw.train])
def test_what_is_no_configuration_is_refused(verb):
    with pytest.raises(mw.InputError, match="int 3 is no configuration"):
        verb(3)


def test_a_configuration_is_read_from_a_path_and_with_numbers_of_numpy(tmp_path):
    (tmp_path / "mine.toml").write_text('preset = "bytes-nano"')
    overrides = {"model.num_layers": np.int64(3), "optimizer.learning_rate": np.float32(0.5)}
    read = mw.load(tmp_path / "mine.toml", overrides)
    assert (read.name, read.model.num_layers, read.optimizer.learning_rate) == ("mine", 3, 0.5)


def test_what_is_explained_is_a_weighing():
    with pytest.raises(mw.InputError, match="str 'bytes-nano' is no weighing"):
        mw.explain("bytes-nano")


def test_a_foreign_program_takes_no_override_that_it_does_not_declare(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    with pytest.raises(mw.InputError, match="recurrent:train_step declares no knob 'steps'"):
        mw.weigh("recurrent:train_step", on="1xCPU", overrides=["steps=3"])


def test_a_foreign_program_is_found_in_the_working_directory(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    weighed = mw.weigh("rematerialised:train_step", on="2xCPU")
    assert weighed.config is None
    assert weighed.ledger.flops.model > 0
    assert mw.weigh("rematerialised:train_step", on="2xCPU").cached


def test_a_foreign_program_cannot_be_trained(monkeypatch, tmp_path):
    monkeypatch.chdir(EXAMPLES)
    with pytest.raises(mw.InputError, match="`train` runs only configurations"):
        mw.train("rematerialised:train_step", on="2xCPU", folder=tmp_path)


def test_a_fleet_that_is_not_attached_is_told_before_anything_is_compiled_or_written(monkeypatch, tmp_path):
    monkeypatch.setattr("meshwright.programs._weighed.compile_program", None)
    with pytest.raises(mw.InputError, match="8xH100 is not attached"):
        mw.train("bytes-nano", on="8xH100", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_compiler_is_named_with_its_extra(monkeypatch):
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(mw.InputError, match="package jax-cuda13-pjrt is missing") as caught:
        mw.weigh("bytes-nano", on="8xH100")
    assert how_to_install("nvidia") in caught.value.hint
    assert "--simulate" in caught.value.hint


def test_a_platform_without_a_compiler_can_be_simulated_and_is_marked():
    with pytest.raises(mw.InputError, match=r"cannot compile for MI300X without one: .* ROCm") as caught:
        mw.weigh("linear", on="8xMI300X")
    assert "--simulate" in caught.value.hint
    weighed = mw.weigh("linear", on="8xMI300X", simulate=True)
    assert weighed.to_dict()["source"] == "simulated on CPU"
    assert weighed.prediction is None
    assert "simulated on CPU" in weighed.no_prediction


def test_a_layout_that_does_not_cover_the_fleet_is_the_users_mistake():
    with pytest.raises(mw.InputError, match="8"):
        mw.weigh("bytes-nano", on="8xH100", layout="fsdp=3")


def test_train_is_the_verb_also_when_its_package_was_imported():
    importlib.import_module("meshwright.trainer.loop")
    assert callable(mw.train)


def test_the_package_tells_an_unknown_name_as_python_does():
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        _ = mw.weight


def test_names_that_are_imported_late_can_be_completed():
    assert {"weigh", "train", "torch_step"} <= set(dir(mw))
    assert "restore" in dir(meshwright.trainer.checkpoint)


def test_every_public_name_is_there():
    assert [name for name in mw.__all__ if not hasattr(sys.modules["meshwright"], name)] == []


def test_a_fleet_with_another_network_is_weighed_as_it_is():
    usual = mw.Fleet.parse("16xH100")
    link = dataclasses.replace(usual.between, bytes_per_second=usual.between.bytes_per_second / 1e4)
    slow = dataclasses.replace(usual, chip=dataclasses.replace(usual.chip, between=link))
    batch = ["batch.sequences=16"]
    found = [mw.weigh("bytes-nano", on=fleet, overrides=batch) for fleet in ("16xH100", usual, slow)]
    by_text, by_fleet, slowed = (each.prediction.step_seconds.expected for each in found)
    assert by_text == by_fleet < slowed
    assert found[0].compiled.fingerprint == found[2].compiled.fingerprint
    assert found[2].to_dict()["fleet"]["between_bytes_per_second"] == link.bytes_per_second


def test_a_link_that_the_catalog_does_not_know_is_null():
    fleet = mw.weigh("linear", on="8xCPU").to_dict()["fleet"]
    assert fleet["between_bytes_per_second"] is None


def test_a_layout_of_a_preset_that_does_not_suit_the_fleet_gives_way_to_the_nearest(forked_workers):
    sizes = {"num_layers": 4, "embed_dim": 64, "mlp_dim": 128, "num_heads": 8, "vocab_size": 256}
    settings = {f"model.{key}": value for key, value in sizes.items()}
    settings |= {"batch.sequences": 4, "batch.sequence_length": 64, "pipeline_chunks": 1}
    weighing = mw.weigh("llama3-405b", on="8xCPU", overrides=settings)
    assert str(weighing.layout) == "tensor=8"
    assert weighing.warnings == (
        "Weighed with layout tensor=8, the nearest for 8 devices: data=-1,stage=16,tensor=8 of llama3-405b "
        "does not",
    )
    with pytest.raises(mw.InputError, match="does not divide the fleet's 8 devices"):
        mw.weigh("llama3-405b", on="8xCPU", layout="data=-1,stage=16,tensor=8", overrides=settings)


def test_the_steps_of_a_preset_are_of_its_own_batch():
    assert mw.weigh("linear", on="1xCPU").num_steps == 100
    other = {"batch.sequences": 128}
    assert mw.weigh("linear", on="1xCPU", overrides=other).num_steps is None
    assert mw.weigh("linear", on="1xCPU", overrides={**other, "steps": 70}).num_steps == 70
    assert mw.weigh("linear", on="1xCPU", overrides=other, run=mw.RunLength(tokens=12800)).num_steps == 100


def test_fine_tuning_has_a_batch_of_its_own_and_no_steps_of_pretraining(tmp_path):
    tuned = mw.load("llama3-8b", {"lora.rank": 8})
    assert tuned.steps is None
    assert (tuned.batch.sequences_per_replica, tuned.batch.microbatch_sequences) == (16, 2)
    kept = mw.load("llama3-8b", ["lora.rank=8", "batch.sequences=4", "steps=9"])
    assert (kept.steps, kept.batch.sequences, kept.batch.sequences_per_replica) == (9, 4, None)
    file = tmp_path / "mine.toml"
    file.write_text('preset = "llama3-8b"\nsteps = 9000\n[batch]\nsequences = 8\n')
    assert mw.load(str(file), {"lora.rank": 8}).batch.sequences == 8


def test_memory_that_is_reserved_for_another_process_decides_whether_a_run_fits():
    """A reserve of 80130 MiB leaves 27 to the program: the libraries take the rest of an H100's 81009."""
    given = {"overrides": ["model.num_layers=1", "batch.microbatch_sequences=2"]}
    plain, shared = (mw.weigh("bytes-10m", on=on, **given) for on in ("1xH100", "1xH100 reserve 80130MiB"))
    assert (plain.fits, shared.fits) == (True, False)
    text = str(shared).replace("\n", " ")
    assert "DOES NOT FIT" in text
    assert "78.3 GiB of it reserved for another process" in text
    assert shared.to_dict()["ledger"]["memory"]["allowance"]["reserved for another process"] == 80130 * 2**20


def test_a_plan_leaves_what_is_reserved_to_another_process():
    from meshwright.hardware import Fleet
    from meshwright.planning import room_of, space_of

    run, fleets = load_config("llama3-8b"), [Fleet.parse(on) for on in ("8xH100", "8xH100 reserve 20GiB")]
    plain, shared = (room_of(fleet, space_of(run, fleet).candidates) for fleet in fleets)
    assert set(plain - shared) == {20 * 2**30}
