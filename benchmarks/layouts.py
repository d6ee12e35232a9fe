"""Every axis of a layout, alone beside fsdp and together with others, compiled for fleets that are not there.

Run: python benchmarks/layouts.py [--only WORD] [--record]. Each case is weighed on 64xH100 and on 256xB200,
and on v5p-128 (64 chips) where TPU's compiler is installed: compile seconds, memory of a device, and what it
sends per step along each axis, inside the fast domain and between. What was not compiled says why. Compile
seconds are wall clock on a machine whose load average is recorded beside them.
--record writes records/DATE_layouts.toml.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from _record import write_record

import meshwright as mw
from meshwright.config import AXES
from meshwright.ledger import Collective

FLEETS = {"64xH100": 64, "256xB200": 256}
TPU_FLEETS = {"v5p-128": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout of a preset: sizes of all axes but `rest`, which takes the devices that are left."""

    preset: str
    sizes: Mapping[str, int]
    rest: str = "fsdp"
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The axes that split something, outermost first."""
        return " x ".join(axis for axis in AXES if axis in {*self.sizes, self.rest})

    def layout(self, num_devices: int) -> str:
        """As `--layout` takes it."""
        taken = 1
        for size in self.sizes.values():
            taken *= size
        assert num_devices % taken == 0, f"{self.name}: {num_devices} devices over {taken}"
        sizes = {**self.sizes, self.rest: num_devices // taken}
        return ",".join(f"{axis}={sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1)


LONG = ("batch.sequences=64", "batch.sequence_length=131072")
DENSE, EXPERTS = "llama3-8b", "mixtral-8x7b"
CASES = (
    Case(preset=DENSE, sizes={}, rest="data"),
    Case(preset=DENSE, sizes={}, rest="fsdp"),
    Case(preset=DENSE, sizes={"tensor": 8}),
    Case(preset=DENSE, sizes={"stage": 8}),
    Case(preset=DENSE, sizes={"context": 8}, overrides=LONG),
    Case(preset=EXPERTS, sizes={"expert": 8}),
    Case(preset=DENSE, sizes={"fsdp": 8}, rest="data"),
    Case(preset=DENSE, sizes={"data": 2, "tensor": 4}),
    Case(preset=DENSE, sizes={"stage": 4, "tensor": 4}),
    Case(preset=DENSE, sizes={"context": 8, "tensor": 2}, overrides=LONG),
    Case(preset=EXPERTS, sizes={"expert": 4, "tensor": 2}),
    Case(preset=DENSE, sizes={"stage": 2, "data": 2, "tensor": 2}),
    Case(preset=DENSE, sizes={"stage": 2, "context": 4, "tensor": 2}, overrides=LONG),
    Case(preset=EXPERTS, sizes={"stage": 2, "expert": 8}),
)


def sent(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes that one device sends per step, by the axes of a group and the class of link: "fsdp, between"."""
    found: dict[str, int] = {}
    for each in collectives:
        if each.wire_bytes:
            key = f"{'*'.join(each.axes)}, {each.link}"
            found[key] = found.get(key, 0) + each.wire_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def weighed(case: Case, fleet: str, num_devices: int) -> dict[str, Any]:
    """The case on a fleet: what the record says of it; `not_compiled` says why there is nothing."""
    layout = case.layout(num_devices)
    told: dict[str, Any] = {
        "axes": case.name,
        "preset": case.preset,
        "fleet": fleet,
        "layout": layout,
        "overrides": list(case.overrides),
    }
    try:
        weighing = mw.weigh(case.preset, on=fleet, layout=layout, overrides=case.overrides)
    except mw.MeshwrightError as error:
        return {**told, "not_compiled": error.message.splitlines()[0]}
    memory, prediction = weighing.ledger.memory, weighing.prediction
    traffic = sent(weighing.ledger.traffic)
    return {
        **told,
        "compile_seconds": round(weighing.compiled.compile_seconds, 1),
        "reserved_gib": round(memory.reserved_bytes / 2**30, 2),
        "fits": weighing.fits,
        "sent_gib": {axes: round(num_bytes / 2**30, 3) for axes, num_bytes in traffic.items()},
        "collectives": sum(each.count for each in weighing.ledger.traffic),
        "step_seconds": float(f"{prediction.step_seconds.expected:.4g}") if prediction else None,
        "mfu": round(prediction.mfu, 3) if prediction and prediction.mfu is not None else None,
        "findings": sorted({finding.kind for finding in weighing.ledger.findings}),
    }


def _told(row: Mapping[str, Any]) -> str:
    head = f"{row['fleet']:9} {row['preset']:12} {row['layout']:34}"
    if "not_compiled" in row:
        return f"{head} not compiled: {row['not_compiled']}"
    sends = ", ".join(f"{axes} {gib:.1f}" for axes, gib in row["sent_gib"].items())
    return f"{head} {row['compile_seconds']:6.1f} s {row['reserved_gib']:7.1f} GiB, sends GiB: {sends}"


def main() -> None:
    """Weigh every case on every fleet, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose axes have this word")
    parser.add_argument("--record", action="store_true", help="write records/DATE_layouts.toml")
    asked = parser.parse_args()
    has_tpu_compiler = importlib.util.find_spec("libtpu") is not None
    rows: list[dict[str, Any]] = []
    for fleet, num_devices in {**FLEETS, **(TPU_FLEETS if has_tpu_compiler else {})}.items():
        for case in CASES:
            if asked.only in case.name:
                rows.append(weighed(case, fleet, num_devices))
                print(_told(rows[-1]), flush=True)
    if not has_tpu_compiler:
        print(f"{', '.join(TPU_FLEETS)}: not compiled: libtpu is not installed")
    if asked.record:
        assert not asked.only, "a record has every case"
        packages = ("jax", "jaxlib", "jax-cuda13-pjrt", *(("libtpu",) if has_tpu_compiler else ()))
        facts = {"libtpu_installed": has_tpu_compiler, "load_average": round(os.getloadavg()[0], 1)}
        print(
            "wrote",
            write_record(
                "layouts", "python benchmarks/layouts.py --record", packages, facts, {"weighed": rows}
            ),
        )


if __name__ == "__main__":
    main()
