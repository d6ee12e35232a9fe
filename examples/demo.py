"""The main job, end to end: weigh a step for machines you do not have, then train one on the one you do.

Run: make demo. It runs three commands that you could type yourself, then compares what they left in runs/.
`--weigh` stops after the first, which needs a minute and no training.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

RUNS = Path("runs")
ONE, EIGHT = RUNS / "demo", RUNS / "demo-8-devices"
FIRST_STEPS = 5
NATS_BELOW_UNIGRAM = 0.5
LOG = () if sys.stderr.isatty() else ("--log-every", "10s")  # a terminal shows a bar
LARGEST_DIFFERENCE = 1e-4  # of fp32 losses near 5, after five updates; sums are ordered otherwise


def meshwright(words: str, *arguments: str) -> None:
    """Run the command line as a person would, showing the command and why it is run; stop if it fails."""
    print(f"\n# {words}\n$ meshwright {' '.join(arguments)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "meshwright", *arguments]).returncode
    if status:
        raise SystemExit(status)


def losses(folder: Path) -> list[float]:
    """Training losses of a run, in the order of its steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    """The three commands, and what must hold between them."""
    words = "1 of 3: compile a step for eight H100s that are not here (a silent minute without a terminal)"
    meshwright(words, "weigh", "llama3-8b", "--on", "8xH100")
    if sys.argv[1:] == ["--weigh"]:
        return
    for folder in (ONE, EIGHT):
        shutil.rmtree(folder, ignore_errors=True)
    words = "2 of 3: train a small Transformer on this machine (two to eight minutes)"
    meshwright(words, "train", "bytes-10m", "--on", "1xCPU", "--folder", str(ONE), *LOG)
    words = "3 of 3: its first steps again, on eight simulated devices (a minute)"
    more = ("--layout", "data=2,fsdp=2,tensor=2", "--steps", str(FIRST_STEPS), *LOG)
    meshwright(words, "train", "bytes-10m", "--on", "8xCPU", *more, "--folder", str(EIGHT))

    measured = json.loads((ONE / "measurement.json").read_text())
    held_out = [
        loss for _, loss in sorted((int(step), loss) for step, loss in measured["held_out_losses"].items())
    ]
    unigram = measured["unigram_entropy_nats"]
    pairs = list(zip(losses(ONE), losses(EIGHT), strict=False))
    difference = max(abs(one - eight) for one, eight in pairs)
    print("\n# the two runs side by side")
    print(f"held-out loss {held_out[0]:.3f} nats before, {held_out[-1]:.3f} after")
    print(f"unigram entropy of the same text {unigram:.3f} nats")
    print(f"first {len(pairs)} losses on 1 and on 8 devices: largest difference {difference:.1e}")
    for one, eight in pairs:
        print(f"    {one:.6f}   {eight:.6f}")
    print(f"report: {ONE / 'report.html'}")
    if len(pairs) != FIRST_STEPS or difference > LARGEST_DIFFERENCE:
        raise SystemExit("the losses of the two layouts do not agree")
    if held_out[-1] > unigram - NATS_BELOW_UNIGRAM:
        raise SystemExit(f"held-out loss did not end {NATS_BELOW_UNIGRAM} nat below the unigram entropy")


if __name__ == "__main__":
    main()
