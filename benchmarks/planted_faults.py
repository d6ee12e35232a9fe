"""Plant one fault in each package of the core and in some rooms outside it; see whether tests find it.

Run: python benchmarks/planted_faults.py [--tests FOLDER] [--record] [PACKAGE ...]. Each fault is one line of
a copy of src; the named tests of `make test` run against the copy, and a fault is found if one of them fails.
--tests runs those of another checkout, to compare the tests before and after a change of theirs. Writes
benchmarks/records/DATE_planted_faults.toml with --record. Exit status is the number of faults that no test
finds.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _record import ROOT, write_record

MARKS = "not wide and not long and not gpu"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A line of a file of src/meshwright, what takes its place, and the tests that should notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """The package of the file, or its room outside the core."""
        first, *rest = self.file.split("/")
        return f"{first}/{rest[0]}" if first == "contrib" else first


def fault(file: str, old: str, new: str, *tests: str) -> Fault:
    """Make a fault of a file, the old line, the new one, and paths below tests/."""
    return Fault(file=file, old=old, new=new, tests=tuple(f"tests/{test}" for test in tests))


FAULTS = (
    fault(
        "api/_train.py",
        "if steps is not None and steps < 1:",
        "if steps is not None and steps < 0:",
        "training/test_run.py::test_a_run_of_no_steps_is_refused",
    ),
    fault(
        "trainer/checkpoint/_manifest.py",
        "if len(expected) < len(manifest.files):",
        "if len(expected) > len(manifest.files):",
        "checkpoint/test_manifest.py",
        "checkpoint/test_newest.py",
    ),
    fault(
        "contrib/clusters/_launch.py",
        "return status if status >= 0 else 128 - status",
        "return status if status >= 0 else 127 - status",
        "cli/test_restarts.py",
    ),
    fault(
        "compiler/_cache.py",
        "if excess <= 0:",
        "if excess >= 0:",
        "compiler/test_cache.py",
    ),
    fault(
        "config/_layout.py",
        "if len(open_axes) > 1:",
        "if len(open_axes) > 2:",
        "config/test_layout.py",
    ),
    fault(
        "contrib/texts/_token_formats.py",
        "if count < 1 or num_bytes != wanted:",
        "if count < 1:",
        "data/test_formats.py",
        "data/test_tokens.py",
    ),
    fault(
        "hardware/_fleet.py",
        "return int(memory_bytes * memory_fraction)",
        "return int(memory_bytes)",
        "hardware/test_fleet.py",
        "hardware/test_target.py",
    ),
    fault(
        "hlo/_text.py",
        "return -(-self.num_elements * DTYPE_BITS[self.dtype] // 8)",
        "return self.num_elements * DTYPE_BITS[self.dtype] // 8",
        "ledger/test_hlo.py",
    ),
    fault(
        "trainer/launch/_join.py",
        "if not 0 <= index < count:",
        "if not 0 <= index <= count:",
        "contrib/clusters/test_join.py",
    ),
    fault(
        "ledger/_memory_ledger.py",
        "begin, end = bisect_left(instants, when.first), bisect_right(instants, when.last)",
        "begin, end = bisect_left(instants, when.first), bisect_left(instants, when.last)",
        "ledger/test_memory.py",
    ),
    fault(
        "contrib/instruments/_array_storages.py",
        "return bits if bits in (2, 4) else 8 * dtype.itemsize",
        "return 8 * dtype.itemsize",
        "contrib/instruments/test_arrays.py",
    ),
    fault(
        "trainer/models/rotary.py",
        "return frequency / config.rope_factor",
        "return frequency * config.rope_factor",
        "models/test_rotary.py",
        "contrib/huggingface/test_huggingface.py",
    ),
    fault(
        "contrib/changes/_smaller_memory.py",
        "return state + activations if state_first else activations + state",
        "return activations + state if state_first else state + activations",
        "contrib/changes/test_suggestions.py",
    ),
    fault(
        "predict/_formulas.py",
        "return np.maximum(arithmetic, memory) + rate.start_seconds",
        "return arithmetic + memory + rate.start_seconds",
        "predict/test_prices.py",
        "predict/test_predict.py",
    ),
    fault(
        "report/_run_report.py",
        'side = "below" if gain >= 0 else "above"',
        'side = "above" if gain >= 0 else "below"',
        "report/test_results_text.py",
    ),
    fault(
        "sharding.py",
        "if shape is not None and num_repeats(dims, shape, mesh) > 1:",
        "if shape is not None and num_repeats(dims, shape, mesh) > 2:",
        "sharding/test_rules.py",
        "step/test_tables.py",
    ),
    fault(
        "trainer/step/_gradients.py",
        "return value / num_microbatches, outcome, mean",
        "return value, outcome, mean",
        "step/test_gradients.py",
    ),
    fault(
        "contrib/torch_eager/_rank_traffic.py",
        "return 2 * payload * (size - 1) // size",
        "return payload * (size - 1) // size",
        "contrib/torch_eager/mesh",
    ),
    fault(
        "contrib/torch_as_jax/_elementwise.py",
        "return jnp.subtract(self, other if alpha == 1 else alpha * other)",
        "return jnp.subtract(self, other)",
        "contrib/torch_as_jax/test_operations.py",
    ),
    fault(
        "trainer/loop/_recording.py",
        "if not deviation or loss <= mean + self._sigmas * deviation:",
        "if not deviation or loss >= mean + self._sigmas * deviation:",
        "training/test_recording.py",
    ),
    fault(
        "contrib/huggingface/_weight_files.py",
        "if each.end > num_bytes:",
        "if each.end > 2 * num_bytes:",
        "contrib/huggingface",
    ),
    fault(
        "worker/_traced.py",
        'return math.prod((2, *(2 for factor in factors if factor.aval.dtype.kind == "c")))',
        "return 2",
        "compiler/test_traced.py",
    ),
    fault(
        "contrib/experts/experts.py",
        "kept = order.rank < (tokens.shape[0] if capacity is None else capacity)",
        "kept = order.rank <= (tokens.shape[0] if capacity is None else capacity)",
        "contrib/experts/test_experts.py",
    ),
    fault(
        "contrib/lora/_adapted_products.py",
        "layers[group] * sum(sizes[group, name]) for group, name in products",
        "layers[group] * max(sizes[group, name]) for group, name in products",
        "contrib/lora/test_lora.py",
    ),
)


def main(arguments: list[str]) -> int:
    """Plant the faults that are asked for, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="only the faults of these")
    parser.add_argument(
        "--tests", type=Path, default=ROOT, metavar="FOLDER", help="the checkout whose tests run"
    )
    parser.add_argument("--record", action="store_true", help="write a dated record")
    given = parser.parse_args(arguments)
    chosen = [each for each in FAULTS if not given.packages or each.package in given.packages]
    rows = list(found_faults(chosen, given.tests.resolve()))
    missed: list[str] = [row["file"] for row in rows if not row["found"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults are found; not: {', '.join(missed) or 'none'}")
    if given.record:
        facts = {"found": len(rows) - len(missed), "planted": len(rows)}
        write_record(
            "planted_faults", "python benchmarks/planted_faults.py", ("jax", "pytest"), facts, {"fault": rows}
        )
    return len(missed)


def found_faults(faults: Iterable[Fault], checkout: Path) -> Iterable[dict[str, Any]]:
    """Yield what became of each fault, planted in a copy of src one after another."""
    with tempfile.TemporaryDirectory(prefix="meshwright-faults-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(source, quiet=2)
        for each in faults:
            file = source / "meshwright" / each.file
            right = file.read_text()
            if right.count(each.old) != 1:
                raise SystemExit(f"{each.file} has {right.count(each.old)} lines like: {each.old}")
            try:
                _write(file, right.replace(each.old, each.new))
                failed = first_failure(each.tests, checkout, source)
            finally:
                _write(file, right)
            print(f"{each.file}: {failed or 'NOT FOUND'}", flush=True)
            yield {"file": each.file, "old": each.old, "new": each.new, "found": bool(failed), "by": failed}


def _write(file: Path, text: str) -> None:
    """Write a module, and remove its bytecode: within a second, Python could not tell the two apart."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def first_failure(tests: tuple[str, ...], checkout: Path, source: Path) -> str:
    """Return the test that fails first on the modules of `source`, or nothing."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "-m",
        MARKS,
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):  # 2: not even collected
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" - ")[0].split(maxsplit=1)[1] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
