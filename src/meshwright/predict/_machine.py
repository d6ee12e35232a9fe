"""Describe one device and its links to the walk, from the catalog, the fitted tables and a calibration.

`Machine` holds all that the walk reads about one device and its links. Figures that a calibration measured
take precedence over the catalog and the tables; `words_of` names the source of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.errors import InputError
from meshwright.hardware import Fleet

from ..hardware import COLLECTIVE_KINDS, Calibration, MeasuredAttention
from ._rates import (
    CUDNN,
    AttentionRate,
    ChipRates,
    CollectiveRate,
    GemmRate,
    Shared,
    attention_of,
    rates_of,
    shared,
    sustained_share,
)


def with_collectives(
    rates: ChipRates, calibration: Calibration, link_bytes_per_second: float, devices_per_host: int = 1
) -> ChipRates:
    """Return the rates, with those of each measured kind and group size in place of the table's.

    `devices_per_host`: the number of simulated devices that share one rate measured for all of them; else 1.
    """
    collectives: dict[str, Mapping[int, CollectiveRate]] = dict(rates.collectives)
    for each in calibration.collectives:
        rate = CollectiveRate(
            efficiency=each.bytes_per_second / devices_per_host / link_bytes_per_second,
            alpha_seconds=each.latency_seconds,
            ramp_seconds=0.0,
        )
        collectives[each.kind] = {**collectives[each.kind], each.group_size: rate}
    return replace(rates, collectives=collectives)


def launch_seconds_among(calibration: Calibration, num_devices: int) -> float:
    """Return the seconds of a launch on each of several simulated devices at once, which share a few cores.

    This is the time at the largest measured number of devices that is not above `num_devices`. Beyond the
    largest measured number it grows in proportion. Without such measurements, it is the time on one device.
    """
    known = {1: calibration.launch_seconds, **calibration.launch_seconds_among}
    count = max(each for each in known if each <= num_devices)
    beyond = num_devices / count if calibration.launch_seconds_among and count == max(known) else 1.0
    return known[count] * beyond


def measured_attention(
    known: tuple[MeasuredAttention, ...], table: AttentionRate, head_size: int, length: int, backward: bool
) -> float:
    """Return the FLOP/s at this length, for the measured head size nearest to `head_size`.

    Between measured lengths the logarithms are interpolated linearly. Beyond them, the nearest measured rate
    is scaled by the table's curve, R(s) = R_inf s / (s + s_half): its value at this length over its value at
    the measured length.
    """
    nearest = min((each.head_size for each in known), key=lambda size: abs(size - head_size))
    rates = {
        each.length: each.backward_flops_per_second if backward else each.forward_flops_per_second
        for each in known
        if each.head_size == nearest
    }
    below = max((at for at in rates if at <= length), default=None)
    above = min((at for at in rates if at >= length), default=None)
    if below is None or above is None:
        at = above if below is None else below
        assert at is not None, "a calibration without attention is not asked"
        return rates[at] * _saturation(table, length) / _saturation(table, at)
    if below == above:
        return rates[below]
    share = math.log(length / below) / math.log(above / below)
    return rates[below] ** (1 - share) * rates[above] ** share


def _saturation(table: AttentionRate, length: int) -> float:
    return length / (length + table.half_length)


def words_of(calibration: Calibration, tables: str, *, simulated: bool) -> str:
    """Return in words which figures of a prediction come from the calibration, and which from `tables`.

    `simulated`: the device is a CPU, for which only the calibration is known.
    """
    formats = ", ".join(calibration.matmul_flops_per_second)
    measured = [f"large products in {formats}", "memory", "launches"]
    if calibration.attention:
        heads = sorted({each.head_size for each in calibration.attention})
        measured.append(f"attention with heads of {_listed(heads)}")
    groups: dict[tuple[int, ...], list[str]] = {}
    for kind in dict.fromkeys(each.kind for each in calibration.collectives):
        sizes = sorted({each.group_size for each in calibration.collectives if each.kind == kind})
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


_NARROW = ("fp8", "fp6", "fp4", "mxfp", "nvfp", "int")  # published runs do not show their clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device of a fleet and its links. All rates are per device.

    `num_sms`: None where no tile or wave quantisation is modelled (TPU, CPU).
    `basis`: the source of the rates: tables | default | roofline | calibration.
    `inside_bytes_per_second`, `between_bytes_per_second`: None where no figure is known.
    """

    name: str
    basis: str
    peak_flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    memory_efficiency: float
    num_sms: int | None
    launch_seconds: float
    inside_bytes_per_second: float | None
    between_bytes_per_second: float | None
    host_bytes_per_second: float | None
    devices_per_domain: int
    rates: ChipRates
    shared: Shared
    gemm_factor: float  # for formats of 16 bits or more
    sustained_share: float | None  # of the peak, for products of 16 bits or more; None where not known
    matmul_of_fp32: str  # the format in which a float32 product runs at default precision
    measured_attention: tuple[MeasuredAttention, ...] = ()
    narrow_products: bool = False  # float32 products run in bf16, on half of the bytes

    def gemm_flops_per_second(self, format_name: str) -> float | None:
        """Return the peak that `GemmRate.efficiency` is a share of; None where the chip has no such peak."""
        peak = self.peak_flops_per_second.get(format_name)
        if peak is None or format_name.startswith(_NARROW):
            return peak
        return peak * self.gemm_factor

    def attention_rate(self, head_size: int, length: int, format_name: str, backward: bool) -> AttentionRate:
        """Return the attention kernel's rate as a share of the peak, measured or from the tables.

        A measured rate covers the whole kernel at this length, including its start.
        """
        table = self.rates.attention_for(head_size)
        if self.measured_attention:
            rate = measured_attention(self.measured_attention, table, head_size, length, backward)
            share = rate / self.peak_flops_per_second[format_name]
            return AttentionRate(efficiency=share, half_length=0.0, start_seconds=0.0)
        return replace(
            table, efficiency=table.efficiency * (self.shared.backward_attention_share if backward else 1.0)
        )

    def sustained_flops_per_second(self, format_name: str) -> float | None:
        """Return the rate that no product exceeds for long; None where it is not known."""
        if self.sustained_share is None or format_name.startswith(_NARROW):
            return None
        return self.peak_flops_per_second[format_name] * self.sustained_share


def machine_of(fleet: Fleet, calibration: Calibration | None, attention_kernel: str = CUDNN) -> Machine:
    """Return the description of a fleet's devices.

    Args:
        calibration: the measured rates. For a CPU they are all that is known. For an accelerator they take
            precedence over the catalog and the published runs.
        attention_kernel: the library whose attention kernel is priced.

    Raises:
        InputError: a CPU without a calibration, a chip whose memory bandwidth the catalog lacks, or an
            unknown attention kernel.
    """
    chip = fleet.chip
    if chip.platform == "cpu":
        return _simulated(fleet, calibration)
    if chip.memory_bytes_per_second is None:
        raise InputError(
            f"the catalog does not know the memory bandwidth of {chip.name}",
            hint="choose a chip with a known bandwidth: `meshwright fleets` lists them",
        )
    common, on_cuda = shared(), chip.platform == "cuda"
    rates = replace(rates_of(chip), attention=attention_of(chip, attention_kernel))
    sustained = sustained_share(chip)
    # JAX's default precision multiplies float32 as TF32 on NVIDIA and as bf16 on a TPU
    # (docs.jax.dev, jax.default_matmul_precision).
    reduced = "tf32" if on_cuda else "bf16" if chip.platform == "tpu" else "fp32"
    machine = Machine(
        name=chip.name,
        basis="tables" if rates.measured else "default" if on_cuda else "roofline",
        peak_flops_per_second=chip.peak_flops_per_second,
        memory_bytes_per_second=chip.memory_bytes_per_second,
        memory_efficiency=common.memory_efficiency,
        num_sms=chip.num_sms,
        launch_seconds=common.launch_seconds,
        inside_bytes_per_second=chip.inside.bytes_per_second if chip.inside else None,
        between_bytes_per_second=chip.between.bytes_per_second if chip.between else None,
        host_bytes_per_second=chip.host.bytes_per_second if chip.host else None,
        devices_per_domain=fleet.chips_per_domain,
        rates=rates,
        shared=common,
        gemm_factor=common.factor_without_sustained if sustained is None else 1.0,
        sustained_share=sustained,
        matmul_of_fp32=reduced if reduced in chip.peak_flops_per_second else "fp32",
    )
    if calibration is None:
        return machine
    # Attention was measured with cuDNN's kernel; another library's kernel has its own rates.
    return _measured(machine, calibration, calibration.attention if attention_kernel == CUDNN else ())


def _measured(
    machine: Machine, calibration: Calibration, attention: tuple[MeasuredAttention, ...]
) -> Machine:
    """Return the machine with measured figures in place of those from the catalog and published runs.

    The tables still supply the effect of a product's shape, and the collectives that were not measured. Where
    the catalog has no rate for the link inside the domain, the fastest measured collective sets it.
    """
    peak = machine.peak_flops_per_second.get("bf16")
    large = calibration.matmul_flops_per_second.get("bf16")
    share = None if peak is None or large is None else large / peak
    link, rates = machine.inside_bytes_per_second, machine.rates
    if calibration.collectives:
        link = link or max(each.bytes_per_second for each in calibration.collectives)
        rates = with_collectives(rates, calibration, link)
    return replace(
        machine,
        memory_bytes_per_second=calibration.memory_bytes_per_second,
        memory_efficiency=1.0,
        launch_seconds=calibration.launch_seconds,
        inside_bytes_per_second=link,
        rates=rates,
        measured_attention=attention,
        sustained_share=machine.sustained_share if share is None else share,
        gemm_factor=machine.gemm_factor if share is None else 1.0,
    )


def _simulated(fleet: Fleet, calibration: Calibration | None) -> Machine:
    """Return one of N simulated devices that share a host: each has an N-th of the host's measured rates.

    A collective that was not measured is priced as a copy through memory: each byte sent is read and written
    once.
    """
    if calibration is None:
        raise InputError(
            f"no rates are known for {fleet.name}: a CPU's are measured, not looked up",
            hint="measure them first: `meshwright probe`",
        )
    share = 1 / fleet.num_devices
    memory = calibration.memory_bytes_per_second * share
    whole = CollectiveRate(efficiency=1.0, alpha_seconds=calibration.launch_seconds, ramp_seconds=0.0)
    plain = GemmRate(
        efficiency=1.0,
        k_half=0.0,
        start_seconds=0.0,
        memory_efficiency=1.0,
        wave_share=0.0,
        small_tile_exponent=0.0,
    )
    # A group larger than those measured is closer to the largest measured group than to a copy.
    sizes = (1,) if calibration.collectives else (1, fleet.num_devices)
    rates = ChipRates(
        gemm={"bf16": plain},
        attention={128: AttentionRate(efficiency=1.0, half_length=0.0, start_seconds=0.0)},
        collectives={kind: dict.fromkeys(sizes, whole) for kind in COLLECTIVE_KINDS},
        measured=True,
    )
    return Machine(
        name=fleet.chip.name,
        basis="calibration",
        peak_flops_per_second={f: r * share for f, r in calibration.matmul_flops_per_second.items()},
        memory_bytes_per_second=memory,
        memory_efficiency=1.0,
        num_sms=None,
        launch_seconds=launch_seconds_among(calibration, fleet.num_devices),
        inside_bytes_per_second=memory / 2,
        between_bytes_per_second=None,
        host_bytes_per_second=None,
        devices_per_domain=fleet.num_devices,
        rates=with_collectives(rates, calibration, memory / 2, fleet.num_devices),
        shared=shared(),
        gemm_factor=1.0,
        sustained_share=None,
        matmul_of_fp32="fp32",
    )
