"""A compiled program saved long ago gives the same ledger today, where there is no jax.

`ledger/fixtures/ledgers.json` holds what the ledgers of two saved programs said when they were committed. If
a change to the ledger is meant to change them, write what this file's `SCRIPT` prints there, and look at the
difference line by line.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

FIXTURES = Path(__file__).parent / "ledger/fixtures"
SCRIPT = """
import json, sys
from pathlib import Path
sys.modules.update(jax=None, jaxlib=None)  # as if they were not installed
from meshwright.compiler import Compiled
from meshwright.hardware import Fleet
from meshwright.ledger import ledger_of

def kept(record, *names):
    return {name: record[name] for name in names}

def ledger(folder):
    compiled = Compiled.load(folder)
    found = ledger_of(folder, compiled, Fleet.parse(compiled.fleet)).to_dict()
    names = "reserved_bytes", "argument_bytes", "peak_bytes", "by_category", "by_certainty", "by_format"
    memory = kept(found["memory"], *names)
    flops = kept(found["flops"], "model", "executed", "recomputed", "by_phase", "by_format")
    names = "kind", "axes", "count", "in_loop", "payload_bytes", "wire_bytes", "overlapped_count"
    traffic = [kept(collective, *names) for collective in found["traffic"]]
    return {"memory": memory, "flops": flops, "traffic": traffic, "unpriced": found["unpriced"]}

names = sys.argv[2:]
print(json.dumps({name: ledger(Path(sys.argv[1]) / name) for name in names}, indent=1, sort_keys=True))
"""


def test_a_saved_program_gives_the_committed_ledger_without_jax():
    expected = json.loads((FIXTURES / "ledgers.json").read_text())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(FIXTURES), *expected],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "random"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
