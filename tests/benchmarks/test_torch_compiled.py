from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from torch_compiled import RUNS, measured_in, script_of

LOG = """import sys
with open(sys.argv[0]) as f:
    code = f.read() # for the log
import math
x = dict(device="cuda")
y = dict(device = 'cuda')

# -----------------------------------------------------------------------------
# int main
raise SystemExit
====================
step:1/2 train_time:1ms
peak memory allocated: 100 MiB reserved: 120 MiB
"""


def test_a_log_gives_the_definitions_of_its_script_without_a_card_and_its_peak():
    script = script_of(LOG)
    assert "raise SystemExit" not in script
    assert "f.read" not in script
    names: dict[str, object] = {}
    exec(script, names)
    assert names["x"] == names["y"] == {"device": "cpu"}
    assert measured_in(LOG) == {"measured_mib": 100, "measured_reserved_mib": 120}
    assert measured_in("peak memory consumption: 34239 MiB\n") == {"measured_mib": 34_239}


def test_two_runs_or_more_were_not_in_sight_when_the_model_was_written():
    assert sum(not run.seen for run in RUNS.values()) >= 2
