"""Name the sources of a prediction's figures where a calibration measured some of them."""

from __future__ import annotations

from meshwright.hardware import Calibration


def words_of(calibration: Calibration, tables: str, *, simulated: bool) -> str:
    """Return in words which figures of a prediction come from the calibration, and which from `tables`.

    `simulated`: the device is a CPU, for which only the calibration is known.
    """
    formats = ", ".join(calibration.matmul_flops_per_second)
    measured = [f"large products in {formats}", "memory", "launches"]
    if calibration.attention:
        heads = sorted({m.head_size for m in calibration.attention})
        measured.append(f"attention with heads of {_listed(heads)}")
    groups: dict[tuple[int, ...], list[str]] = {}
    for kind in dict.fromkeys(m.kind for m in calibration.collectives):
        sizes = sorted({m.group_size for m in calibration.collectives if m.kind == kind})
        groups.setdefault(tuple(sizes), []).append(kind)
    measured += [f"{_listed(kinds)} among {_listed(sizes)}" for sizes, kinds in groups.items()]
    words = f"measured on {calibration.date} ({calibration.source}): {'; '.join(measured)}"
    if simulated:
        copied = "" if groups else "; collectives taken as copies through memory"
        return words + copied
    left = ["the shape of products"]
    left += [] if calibration.attention else ["attention"]
    left += ["other groups"] if groups else ["collectives"]
    return f"{words}; from {tables}: {_listed(left)}"


def _listed(items: list[str] | list[int] | tuple[int, ...]) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last
