from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meshwright.extras import how_to_install

HUGE = ("--set", "model.input_dim=1_000_000_000")  # rows of 4 GB: nothing holds 64 of them, and none is made


def test_json_has_the_names_that_others_build_on(meshwright):
    answer = meshwright("weigh", "cruncher", "--on", "2xCPU", "--json").json
    assert {"schema", "config", "layout", "sequence_length", "tokens_per_step", "source", "fits"} <= set(
        answer
    )
    links = {"inside_bytes_per_second": None, "between_bytes_per_second": None}  # of simulated devices
    domains = {"domain": "host", "num_domains": 1}
    assert answer["fleet"] == {"name": "2xCPU", "chip": "CPU", "num_devices": 2, **links, **domains}
    ledger = answer["ledger"]
    assert {"reserved_bytes", "peak_bytes", "allowance_bytes", "usable_bytes", "by_category"} <= set(
        ledger["memory"]
    )
    assert sum(ledger["memory"]["by_category"].values()) == ledger["memory"]["reserved_bytes"]
    assert {"model", "executed", "recomputed", "by_phase"} <= set(ledger["flops"])
    assert {"kind", "axes", "count", "payload_bytes", "wire_bytes"} <= set(ledger["traffic"][0])
    assert isinstance(ledger["unpriced"], list)
    assert set(answer["prediction"]["step_seconds"]) == {"low", "expected", "high"}
    assert {"tokens_per_second_per_device", "mfu", "hfu"} <= set(answer["prediction"])
    assert {"seconds", "cached", "compiler", "options"} <= set(answer["compile"])


def test_the_flops_of_the_cruncher_are_those_counted_by_hand(meshwright):
    answer = meshwright("weigh", "cruncher", "--on", "2xCPU", "--json").json
    batch, width = 64, 64
    parameters = 2 * width**2 + width
    by_hand = 2 * batch * parameters + 4 * batch * parameters - 2 * batch * width**2
    assert answer["ledger"]["flops"]["model"] == by_hand


def test_for_a_person_the_verdict_comes_first(meshwright):
    done = meshwright("weigh", "cruncher", "--on", "2xCPU")
    assert done.status == 0
    first, second, third, *rest = done.output.splitlines()
    assert first == "cruncher on 2xCPU, layout data=2, 8.26K parameters, 64 rows per step"
    assert second == "NO VERDICT: a simulated CPU device has no memory of its own"
    assert third.startswith("STEP: ")
    assert rest[0].startswith("  its interval: ")  # of a CPU it always has reasons, in one line or more
    assert any(line.startswith("RUN: 6.4K rows in 100 steps take ") for line in rest[:6])
    assert len(rest) <= 24
    whole = meshwright("weigh", "cruncher", "--on", "2xCPU", "--verbose")
    assert whole.output.splitlines()[:2] == [first, second]
    assert "524 kFLOP  products nobody asked for, as the gradient of the input" in whole.output


def test_tokens_and_a_price_give_hours_and_cost(meshwright):
    arguments = ("weigh", "cruncher", "--on", "2xCPU", "--tokens", "1T", "--price", "1.80")
    done = meshwright(*arguments)
    assert "RUN: 1T rows in 15,625,000,000 steps take " in done.output
    assert "device-hours" in done.output
    assert " at 1.80" in done.output
    assert "\nFINISH: " in done.output
    answer = meshwright(*arguments, "--json").json
    total, step = answer["run_total"], answer["prediction"]["step_seconds"]
    assert total["steps"] == 10**12 // 64
    for end in ("low", "expected", "high"):
        assert total["seconds"][end] == pytest.approx(step[end] * total["steps"])
        assert total["device_hours"][end] == pytest.approx(2 * total["seconds"][end] / 3600)
        assert total["cost"][end] == pytest.approx(1.8 * total["device_hours"][end])


def test_how_a_run_is_operated_decides_its_day(meshwright):
    arguments = ("weigh", "cruncher", "--on", "2xCPU", "--tokens", "10T", "--start", "2026-12-01")
    answers = ("--restart", "automatic", "--checkpoint-seconds", "30", "--failures", "12 in 400 node-days")
    answer = meshwright(*arguments, *answers, "--json").json["finish"]
    assert (answer["start"], answer["restart"], answer["questions"]) == ("2026-12-01", "automatic", [])
    assert "2026-12-01" <= answer["finish_date"]["low"] <= answer["finish_date"]["expected"]
    assert 0 < answer["useful_share"]["low"] < answer["useful_share"]["high"] <= 1
    refused = meshwright(*arguments, "--restart", "perhaps")
    assert refused.status == 2
    assert "restart 'perhaps'" in refused.talk


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cruncher", "--tokens", "0"), "0 tokens cannot be the tokens of a run"),
        (("cruncher", "--tokens", "-5"), "cannot read '-5' as a count"),
        (("cruncher", "--tokens", "abc"), "cannot read 'abc' as a count"),
        (("cruncher", "--tokens", "9" * 5000), "as a count"),
        (("cruncher", "--tokens", "1e99"), "more than 1e18 tokens"),
        (("cruncher", "--price", "free"), "'free' is not a price of a device-hour"),
        (("theirs:program", "--tokens", "15B"), "the number of tokens in its step is not known"),
        (("theirs:program", "--price", "2"), "a price of 2 cannot be turned into the cost of a run"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_words_before_anything_is_compiled(
    meshwright, monkeypatch, arguments: tuple[str, ...], words: str
):
    monkeypatch.setattr("meshwright.programs._weighed.compile_program", None)
    done = meshwright("weigh", *arguments, "--on", "2xCPU")
    assert (done.status, words in done.talk) == (2, True), done.talk
    assert "\nhint: " in done.talk


def test_overrides_and_layout_reach_the_program(meshwright):
    arguments = (
        "--on",
        "2xCPU",
        "--layout",
        "fsdp=2",
        "--set",
        "batch.sequences=32",
        "--set",
        "model.width=32",
    )
    answer = meshwright("weigh", "cruncher", *arguments, "--json").json
    assert (answer["layout"], answer["tokens_per_step"], answer["num_parameters"]) == (
        "fsdp=2",
        32,
        2 * 32**2 + 32,
    )


def test_what_does_not_fit_is_an_answer_and_with_check_an_exit_status(meshwright):
    # The CPU's compiler stands in, so that the test holds without the nvidia extra.
    arguments = ("weigh", "linear", "--on", "1xMI300X", "--simulate", *HUGE)
    done = meshwright(*arguments)
    assert done.status == 0
    assert "SIMULATED ON CPU" in done.output
    assert "DOES NOT FIT" in done.output
    assert "--set batch.microbatch_sequences=32" in done.output
    checked = meshwright(*arguments, "--check", "--json")
    assert checked.status == 3
    assert checked.json["fits"] is False
    assert checked.json["source"] == "simulated on CPU"
    assert checked.json["ledger"]["memory"]["buffers"][0]["num_bytes"] == 64 * 4 * 10**9


def test_what_fits_passes_the_check(meshwright):
    done = meshwright("weigh", "linear", "--on", "1xMI300X", "--simulate", "--check")
    assert done.status == 0
    assert "FITS" in done.output


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (("llama3-8", "--on", "8xH100"), "no preset is named 'llama3-8'", "'llama3-8b'"),
        (("linear", "--on", "8xH10"), "unknown chip 'H10'", "'H100'"),
        (("linear", "--on", "1xCPU", "--set", "batch.sequenses=8"), "batch.sequenses", "'sequences'"),
        (("linear", "--on", "8xCPU", "--layout", "dta=8"), "unknown axis 'dta'", "'data'"),
        (("linear", "--on", "8xCPU", "--layout", "data=4"), "data = 4 is not the fleet's 8", "use data=8"),
        (
            ("linear", "--on", "8xCPU", "--set", "batch.sequences=12"),
            "batch.sequences = 12 does not divide over data*fsdp = 8",
            "use batch.sequences = 8 or 16",
        ),
        (
            ("llama3-8b", "--on", "64xH100", "--layout", "tensor=64"),
            "model.num_heads = 32 does not divide over tensor = 64",
            "use tensor=32",
        ),
        (("nowhere.toml", "--on", "1xCPU"), "no file nowhere.toml", "known"),
        (("linear", "--on", "8xMI300X"), "MI300X", "--simulate"),
        (("nowhere:program", "--on", "1xCPU"), "nowhere", ""),
    ],
)
def test_bad_input_exits_with_2_and_names_what_would_work(
    meshwright, tmp_path: Path, monkeypatch, arguments: tuple[str, ...], words: str, hint: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known.toml").write_text('preset = "linear"\n')
    done = meshwright("weigh", *arguments)
    assert done.status == 2, done.talk
    error, _, said = done.talk.partition("\nhint: ")
    assert words in error
    assert hint in said


def test_a_missing_compiler_says_what_to_install(meshwright, monkeypatch):
    import importlib.metadata

    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == "jax-cuda13-pjrt":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    done = meshwright("weigh", "linear", "--on", "8xH100")
    assert done.status == 2
    assert "jax-cuda13-pjrt" in done.talk
    assert how_to_install("nvidia") in done.talk
    assert "--simulate" in done.talk


def test_ctrl_c_ends_with_130_and_leaves_no_worker(tmp_path: Path):
    # A cache of its own: else there could be no worker to interrupt.
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "weigh", "bytes-10m", "--on", "8xCPU"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MESHWRIGHT_CACHE_DIR": str(tmp_path)},
    )
    workers: list[psutil.Process] = []
    while not workers:
        assert process.poll() is None, process.stderr.read()
        workers = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, talk = process.communicate()
    assert process.returncode == 130
    assert output == ""
    assert "Traceback" not in talk
    _, alive = psutil.wait_procs(workers, timeout=10)  # a guard ends a worker that was only just started
    assert not alive
    assert not list(tmp_path.glob("compiled/*"))


def test_weighing_loads_no_jax():
    code = (
        "import sys; from meshwright import weigh; weigh('cruncher', on='2xCPU'); "
        "print(sorted({'jax', 'jaxlib', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_account_can_be_a_page(meshwright, tmp_path):
    done = meshwright("weigh", "cruncher", "--on", "2xCPU", "--html", str(tmp_path / "page.html"))
    assert done.status == 0
    assert "<h1>cruncher</h1>" in (tmp_path / "page.html").read_text()
    refused = meshwright("weigh", "cruncher", "--on", "2xCPU", "--html", str(tmp_path / "no/page.html"))
    assert refused.status == 2
    assert "No such file or directory" in refused.talk


def test_explained_each_change_is_compiled_and_set_beside(meshwright):
    arguments = ("weigh", "cruncher", "--on", "2xCPU", "--explain")
    done = meshwright(*arguments)
    assert "What would help, each change compiled" in done.output
    assert "--layout fsdp=2" in done.output
    changes = meshwright(*arguments, "--json").json["changes"]
    assert {change["arguments"] for change in changes} >= {"--layout fsdp=2"}


def test_the_predicted_step_can_be_a_trace(meshwright, tmp_path):
    done = meshwright("weigh", "cruncher", "--on", "2xCPU", "--trace", str(tmp_path / "trace.json"))
    assert done.status == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["cat"] == "matmul" for event in events)
    refused = meshwright("weigh", "cruncher", "--on", "2xCPU", "--trace", str(tmp_path / "no/trace.json"))
    assert (refused.status, "cannot write" in refused.talk) == (2, True)
    simulated = ("weigh", "linear", "--on", "1xMI300X", "--simulate", "--trace", str(tmp_path / "t.json"))
    assert "no time is predicted for 1xMI300X" in meshwright(*simulated).talk


def test_rules_for_kernels_are_read_from_a_file(meshwright, tmp_path):
    (tmp_path / "rules.py").write_text("1 / 0")
    rules = str(tmp_path / "rules.py")
    answer = meshwright("weigh", "recurrent:train_step", "--on", "2xCPU", "--rules", rules)
    assert answer.status == 2
    assert "ZeroDivisionError" in answer.talk
