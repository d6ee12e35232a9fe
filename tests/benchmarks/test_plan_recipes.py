"""The script that sets the planner's choice beside NVIDIA's recipes."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import plan_recipes
from _published_rows import InexpressibleError, express
from plan_recipes import compared, expressed, recipe_candidates, summary_of

from meshwright.config import load_config
from meshwright.planning import candidates_of
from tests.benchmarks.rows import SIZES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEMO = {
    "id": "dgxcnemo-900",
    "model": "Llama 3.1 8B",
    "params_b": "",
    **SIZES,
    "moe": "",
    "accelerator": "H100-80GB-SXM",
    "n_devices": "16",
    "devices_per_node": "8",
    "precision": "bf16",
    "optimizer": "Adam",
    "sharding": "ZeRO-1 (distributed optimizer)",
    "dp": "8",
    "fsdp": "",
    "tp": "1",
    "pp": "1",
    "vp": "1",
    "cp": "2",
    "ep": "1",
    "micro_batch_per_device": "1",
    "global_batch_seqs": "128",
    "act_ckpt": "none",
    "attention_impl": "cudnn (TE)",
    "step_time_s": "",
    "notes": "",
}
FIX = ("offload=none", "inner=tensor", "expert=1", "stage=1")


@pytest.fixture(scope="module")
def row():
    return compared(NEMO, FIX)


def test_the_recipe_has_its_own_layout_and_the_policy_that_promises_most(row):
    assert row["recipe"]["overrides"]["layout"] == "data=8,context=2"
    assert row["recipe"]["overrides"]["zero1"] is True
    assert row["recipe"]["overrides"]["remat"] in plan_recipes.POLICIES
    run = expressed(NEMO).config
    candidates = recipe_candidates(run)
    layouts = {str(candidates.layout(place)) for place in range(len(candidates))}
    assert layouts == {"data=8,context=2"}
    assert {candidates.overrides(place)["remat"] for place in range(len(candidates))} == {
        run.remat,
        *plan_recipes.POLICIES,
    }


def test_the_planner_may_choose_the_recipe_and_so_is_hardly_slower(row):
    assert row["choice"]["fits"] > 0.5
    assert row["matched"]
    assert row["choice"]["seconds"] <= 1.03 * row["recipe"]["seconds"]


def test_a_choice_that_is_kept_from_better_layouts_loses():
    found = compared(NEMO, ("offload=none", "inner=tensor", "tensor=16", "microbatch=1", "remat=full"))
    assert not found["matched"]
    assert found["slower_by"] > 0.03
    assert summary_of([found])["slower"] == {"dgxcnemo-900": found["slower_by"]}


def test_sums_count_by_source_and_name_what_lost(row):
    lost = {**row, "id": "dgxcmaxtext-901", "matched": False, "slower_by": 0.1}
    summary = summary_of([row, lost])
    assert (summary["recipes"], summary["matched_or_beaten"], summary["share"]) == (2, 1, 0.5)
    assert summary["by_source"] == {"dgxcnemo": "1 of 1", "dgxcmaxtext": "0 of 1"}
    assert "compiled" not in summary
    compiled = {
        **row,
        "compiled_recipe": {"failed": "", "fits": True, "seconds": 10.0},
        "compiled_choice": {"failed": "", "fits": False, "seconds": 9.0},
    }
    assert summary_of([compiled])["matched_or_beaten_compiled"] == 0


def test_a_recipe_with_rematerialisation_of_its_own_kind_repeats_all():
    strange = {**NEMO, "act_ckpt": "every second attention, by hand"}
    with pytest.raises(InexpressibleError, match="rematerialisation of its own kind"):
        express(strange)
    assert expressed(strange).config.remat == "full"
    with pytest.raises(InexpressibleError, match="experts of a model that is not known"):
        expressed({**NEMO, "moe": "8 experts"})


def test_measured_columns_are_not_read(tmp_path):
    found = []
    for name, seconds in (("a", "1.5"), ("b", "no number")):
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, NEMO)
            writer.writeheader()
            writer.writerow({**NEMO, "step_time_s": seconds})
        fixed = [word for knob in FIX for word in ("--fix", knob)]
        command = [sys.executable, str(BENCHMARKS / "plan_recipes.py"), "--runs", str(path), *fixed, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert found[0]["rows"][0]["id"] == "dgxcnemo-900"


def test_runs_are_candidates_with_their_own_settings():
    runs = [
        load_config("llama3-8b", ["layout=stage=2,data=2,tensor=2", "zero1=true", "pipeline_chunks=4"]),
        load_config("llama3-8b", ["layout=tensor=2,data=4", "batch.microbatch_sequences=4"]),
    ]
    found = candidates_of(runs)
    assert str(found.layout(0)) == "stage=2,data=2,tensor=2"
    assert found.overrides(0)["pipeline_chunks"] == 4
    assert found.overrides(0)["zero1"] is True
    assert str(found.layout(1)) == "tensor=2,data=4"  # data lies innermost
    assert found.overrides(1)["batch.microbatch_sequences"] == 4
