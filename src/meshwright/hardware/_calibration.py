"""Hold the rates that `probe` measured on a machine, which no catalog can know."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field

from meshwright.errors import InputError, nearest_name
from meshwright.formats import FORMATS
from meshwright.json_records import EXACT, read_record
from meshwright.reportable import Reportable

_PROBE_AGAIN = "measure again: `meshwright probe`"
COLLECTIVE_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAttention:
    """Rates of the fused causal attention kernel at one size. FLOPs count the needed half of the scores.

    `backward_flops_per_second`: counted with five products, against the two of the forward kernel.
    """

    __pydantic_config__ = EXACT
    head_size: int
    length: int
    forward_flops_per_second: float
    backward_flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One kind of collective in one group size: seconds = latency + wire bytes / `bytes_per_second`.

    `bytes_per_second`: the rate at which one device sends; for simulated CPU devices, all of the host
    together.
    """

    __pydantic_config__ = EXACT
    kind: str  # one of COLLECTIVE_KINDS
    group_size: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibration(Reportable):
    """Measured rates of a whole host's CPU, which simulated devices share, or of one accelerator.

    `matmul_flops_per_second`: the rate of a large product, by format name.
    `memory_bytes_per_second`: bytes read plus bytes written.
    `launch_seconds`: the time of one instruction that does nothing.
    `launch_seconds_among`: the same on each of several simulated devices at once, by their number.
    `source`: the method of measurement.
    `attention`, `collectives`: the measured sizes and groups; tables supply all others.
    `details`: other measurements, by name with unit. They are shown and not used.
    `spread`: by rate, the distance of the second best round from the best, as a share of the best.
    `load`: the share of the machine's cores that other processes kept busy meanwhile; None if not observed.
    `jaxlib`: the version that was measured.
    `measured_again`: the run that disagreed with the earlier rates, which these replace.

    Raises:
        InputError: a rate is not a positive number, or a format or a kind of collective is unknown.
    """

    __pydantic_config__ = EXACT
    matmul_flops_per_second: dict[str, float] = field(hash=False)
    memory_bytes_per_second: float
    launch_seconds: float
    date: str  # YYYY-MM-DD
    source: str
    chip: str = "CPU"  # as the catalog names it
    launch_seconds_among: dict[int, float] = field(default_factory=dict[int, float], hash=False)
    attention: tuple[MeasuredAttention, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    details: dict[str, float] = field(default_factory=dict[str, float], hash=False)
    spread: dict[str, float] = field(default_factory=dict[str, float], hash=False)
    load: float | None = None
    jaxlib: str = ""
    measured_again: str = ""

    def __post_init__(self) -> None:
        rates = {f"matmul_flops_per_second.{name}": r for name, r in self.matmul_flops_per_second.items()}
        rates["memory_bytes_per_second"] = self.memory_bytes_per_second
        rates["launch_seconds"] = self.launch_seconds
        rates |= {f"launch_seconds_among.{count}": s for count, s in self.launch_seconds_among.items()}
        for name in ("attention", "collectives"):
            for place, measured in enumerate(getattr(self, name)):
                fields = dataclasses.asdict(measured).items()
                rates |= {f"{name}[{place}].{key}": value for key, value in fields if key != "kind"}
        for name, rate in rates.items():
            if not math.isfinite(rate) or rate <= 0:
                raise InputError(f"calibration: {name} = {rate} is not a positive number", hint=_PROBE_AGAIN)
        unknown = sorted(set(self.matmul_flops_per_second) - set(FORMATS))
        if unknown or not self.matmul_flops_per_second:
            what = f"unknown formats {unknown}" if unknown else "no format at all"
            raise InputError(f"calibration: matmul_flops_per_second names {what}", hint=_PROBE_AGAIN)
        for kind in (measured.kind for measured in self.collectives):
            if kind not in COLLECTIVE_KINDS:
                hint = nearest_name(kind, COLLECTIVE_KINDS)
                raise InputError(f"calibration: no collective is called {kind!r}", hint=hint)

    def launch_seconds_on(self, num_devices: int) -> float:
        """Return the seconds of a launch on each of several simulated devices, which share a few cores.

        This is the time at the largest measured number of devices that is not above `num_devices`. Beyond
        the largest measured number it grows in proportion. Without such measurements, it is the time on one
        device.
        """
        known = {1: self.launch_seconds, **self.launch_seconds_among}
        count = max(devices for devices in known if devices <= num_devices)
        beyond = num_devices / count if self.launch_seconds_among and count == max(known) else 1.0
        return known[count] * beyond

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Calibration:
        """Read the text that `to_json` writes.

        Raises:
            InputError: the text is not a JSON object with exactly these fields, or a value has another type.
        """
        return read_record(Calibration, text, name="a calibration", hint=_PROBE_AGAIN)


def measured_attention(
    known: tuple[MeasuredAttention, ...], half_length: float, head_size: int, length: int, backward: bool
) -> float:
    """Return the FLOP/s at this length, for the measured head size nearest to `head_size`.

    Between measured lengths the logarithms are interpolated linearly. Beyond them, the nearest measured rate
    is scaled by the curve R(s) = R_inf s / (s + half_length): its value at this length over its value at the
    measured length.
    """
    nearest = min((m.head_size for m in known), key=lambda size: abs(size - head_size))
    rates = {
        m.length: m.backward_flops_per_second if backward else m.forward_flops_per_second
        for m in known
        if m.head_size == nearest
    }
    below = max((at for at in rates if at <= length), default=None)
    above = min((at for at in rates if at >= length), default=None)
    if below is None or above is None:
        at = above if below is None else below
        assert at is not None, "a calibration without attention is not asked"
        longer = length / (length + half_length)
        return rates[at] * longer / (at / (at + half_length))
    if below == above:
        return rates[below]
    share = math.log(length / below) / math.log(above / below)
    return rates[below] ** (1 - share) * rates[above] ** share
