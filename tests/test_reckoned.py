"""What is reckoned from a compiled program is kept beside it, and equals what is reckoned again."""

import ast
import dataclasses
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.compiler import Compiled, digest_of_sources
from meshwright.hardware import Fleet, MeasuredRuns
from meshwright.ledger import MultiplyAdds, executions_in, ledger_of, register_call
from meshwright.ledger import _work_rules as _rules
from meshwright.measure import KnownRates
from meshwright.predict import predict
from meshwright.programs import _reckoned
from meshwright.programs._reckoned import SOURCES, reckoned

PROGRAM = Path(__file__).parent / "ledger/fixtures/transformer-8xH100"
PACKAGE = Path(mw.__file__).parent

NOTHING = KnownRates()  # nothing was measured


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A compiled program in a folder of its own, on the fleet it is for; nothing is measured of its chip."""
    monkeypatch.setattr(_rules, "_REGISTERED", {})  # an example of `register_call` may have run before
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(PROGRAM, tmp_path / "program"))
    compiled = Compiled.load(folder)
    return folder, compiled, Fleet.parse(compiled.fleet)


def kept(folder):
    return sorted(folder.glob("beside-*"))


def as_text(figures):
    return json.dumps(dataclasses.asdict(figures))


def test_figures_that_are_kept_are_those_that_are_reckoned_to_the_last_digit(program):
    folder, compiled, fleet = program
    executions = executions_in(folder, compiled)
    ledger = ledger_of(folder, compiled, fleet, executions)
    prediction = predict(executions, ledger, compiled, fleet)
    first = reckoned(folder, compiled, fleet, NOTHING)
    assert as_text(first.ledger) == as_text(ledger)
    assert as_text(first.prediction) == as_text(prediction)
    assert first.no_prediction == ""
    (folder / "program.hlo.txt.gz").unlink()  # the second time nothing is read but what is kept
    assert reckoned(folder, compiled, fleet, NOTHING) == first
    assert len(kept(folder)) == 1


def digested(text):
    return gzip.compress(hashlib.sha256(text.encode()).hexdigest().encode() + b"\n" + text.encode())


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"not compressed at all",
        lambda content: gzip.compress(gzip.decompress(content).replace(b"1", b"2")),
        lambda content: digested("[" * 100_000),
        lambda content: digested('{"ledger": null, "prediction": null, "no_prediction": ""}'),
    ],
    ids=["empty", "cut", "plain", "altered", "deep", "foreign"],
)
def test_a_damaged_text_is_reckoned_again(program, damage):
    folder, compiled, fleet = program
    first = reckoned(folder, compiled, fleet, NOTHING)
    (file,) = kept(folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert reckoned(folder, compiled, fleet, NOTHING) == first
    assert [each.read_bytes() for each in kept(folder)] == [whole]


def test_other_inputs_are_reckoned_apart(program, monkeypatch):
    folder, compiled, fleet = program
    first = reckoned(folder, compiled, fleet, NOTHING)
    other = reckoned(folder, dataclasses.replace(compiled, tokens_per_step=1000), fleet, NOTHING)
    assert other.prediction.tokens_per_second_per_device != first.prediction.tokens_per_second_per_device
    slow = dataclasses.replace(fleet, chip=dataclasses.replace(fleet.chip, memory_bytes_per_second=1e12))
    slower = reckoned(folder, compiled, slow, NOTHING)
    assert slower.prediction.step_seconds.expected > first.prediction.step_seconds.expected
    assert len(kept(folder)) == 3
    runs = MeasuredRuns(chip=fleet.chip.name, runs=())
    reckoned(folder, compiled, fleet, KnownRates(measured=runs))
    assert len(kept(folder)) == 4
    monkeypatch.setattr(_reckoned, "digest_of_sources", lambda names: "of another release")
    assert reckoned(folder, compiled, fleet, NOTHING) == first
    assert len(kept(folder)) == 5


def test_nothing_is_kept_while_a_custom_call_has_a_rule_of_the_users(program, monkeypatch):
    folder, compiled, fleet = program
    monkeypatch.setattr(_rules, "_REGISTERED", {})
    register_call("my_matmul", lambda call: MultiplyAdds(kind="matmul", flops=1, format="bf16"))
    reckoned(folder, compiled, fleet, NOTHING)
    assert kept(folder) == []


def test_the_digest_covers_all_that_reckoning_imports():
    covered = {name.removesuffix(".py") for name in SOURCES}
    # These hold no figure.
    covered |= {"lazy_imports", "sandbox", "subprocesses", "extras", "files", "registry", "reportable"}
    folders = [PACKAGE / name for name in SOURCES if not name.startswith("programs/")]
    files = [file for each in folders for file in (each.rglob("*.py") if each.is_dir() else [each])]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                depth = len(file.relative_to(PACKAGE).parts)
                name = node.module or ""
                above = name.removeprefix("meshwright.") if not node.level else name
                if name.startswith("meshwright.") or (node.level and node.level == depth):
                    assert above.partition(".")[0] in covered, f"{file}: {name}"


def test_a_warm_weighing_loads_nothing_that_reckons():
    cold = mw.weigh("linear", on="8xH100")
    script = """
import json, sys
import meshwright as mw
weighing = mw.weigh("linear", on="8xH100")
fields = weighing.to_dict()
assert str(weighing)
heavy = {"jax", "numpy", "meshwright.hlo._text", "meshwright.predict._walk"}
heavy |= {"meshwright.ledger._memory_ledger"}
found = {"cached": fields.pop("compile")["cached"], "loaded": sorted(heavy & set(sys.modules))}
print(json.dumps({**found, **fields}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found.pop("cached"), found.pop("loaded")) == (True, [])
    expected = cold.to_dict()
    del expected["compile"]
    assert json.dumps(found) == json.dumps(expected)


def test_a_digest_of_sources_that_are_not_there_is_refused():
    with pytest.raises(FileNotFoundError):
        digest_of_sources(("ledger", "no_such_room"))
