"""`meshwright probe`."""

from __future__ import annotations

import dataclasses

from ._console import JsonFlag, phases, print_json, show


def probe(as_json: JsonFlag = False) -> None:
    """Measure what the attached device really does, and keep it: predictions use it from then on."""
    from meshwright import measure

    with phases("measuring this machine, best done while nothing else runs") as on_phase:
        on_phase("products, attention, memory, messages")
        calibration = measure.probe()
    if as_json:
        print_json(dataclasses.asdict(calibration))
        return
    from meshwright.report import calibration_text

    show(calibration_text(calibration))
