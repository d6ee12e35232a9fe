"""Describe a device to the walk: its rates, from tables, published runs, measured cards or a calibration.

`rates.toml` holds the coefficients by chip, and `rates_of` supplies those of a chip without tables.
`runs.toml` holds figures from published runs and from others' reports, which all predictions share.

`Machine` holds all that the walk reads about one device and its links. Figures that a calibration measured
take precedence over the catalog and the tables; `_sources.words_of` names the source of each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from meshwright.errors import InputError, nearest_name
from meshwright.hardware import (
    COLLECTIVE_KINDS,
    Calibration,
    Chip,
    Fleet,
    MeasuredAttention,
    measured_attention,
)
from meshwright.ledger import EXCHANGES

from ._factors import NO_FACTORS, Factors, Prior, before_measuring, digest_of
from ._formulas import AttentionRate, CollectiveRate, GemmRate, Number, gemm_seconds
from ._rate_files import fitted, runs, share_of_peak, single_device_rates

if TYPE_CHECKING:
    from meshwright.hardware import MeasuredRuns

Rate = TypeVar("Rate", GemmRate, AttentionRate, CollectiveRate)

TPU, OTHER_TPU = "tpu", "other-tpu"
CUDNN = "cudnn"
"""The attention kernel that our own programs call."""
OTHERS = "others"
"""The attention kernels of accelerators other than NVIDIA's."""
# The PCIe systems of the tables: one with peer-to-peer transfers, one that sends through the host's memory.
# Of those with NVLink, the one whose all-reduces run in rings: newer switches sum by themselves.
_PEER_SYSTEM, _HOST_SYSTEM, _RING_SYSTEM = "rtx_pro_6000_server", "l40s", "a100_sxm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipRates:
    """Coefficients for one chip: GEMMs by format, attention by head size, collectives by kind and group.

    `measured`: True if they come from tables of this chip itself.
    """

    gemm: Mapping[str, GemmRate]
    attention: Mapping[int, AttentionRate]
    collectives: Mapping[str, Mapping[int, CollectiveRate]]
    measured: bool

    def gemm_for(self, format_name: str) -> GemmRate:
        """Return the coefficients of fp8-e4m3 for any fp8 if the chip has them, else those of bf16.

        Their efficiency is a share of the peak of `format_name`.
        """
        if format_name.startswith("fp8") and "fp8-e4m3" in self.gemm:
            return self.gemm["fp8-e4m3"]
        return self.gemm["bf16"]

    def attention_for(self, head_size: int) -> AttentionRate:
        """Return the rate of the nearest measured head size."""
        return self.attention[min(self.attention, key=lambda measured: abs(measured - head_size))]

    def collective_for(self, kind: str, group_size: int) -> CollectiveRate:
        """Return the rate of the largest measured group that is not above `group_size`.

        Beyond the largest measured group the ring has more steps, so alpha grows in proportion. No table has
        collective-permute: it is priced as an all-to-all of two devices, which sends the same bytes. A ragged
        all-to-all is priced as one of equal parts.
        """
        if kind == "collective-permute":
            kind, group_size = "all-to-all", 2
        kind = "all-to-all" if kind in EXCHANGES else kind
        by_size = self.collectives[kind]
        size = max((s for s in by_size if s <= group_size), default=min(by_size))
        rate = by_size[size]
        if group_size <= size:
            return rate
        longer = 1.0 if size < max(by_size) else group_size / size
        return replace(rate, alpha_seconds=rate.alpha_seconds * longer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Constants that all predictions share. Efficiencies are shares of catalog rates. Sources: runs.toml."""

    factor_without_sustained: float
    backward_attention_share: Mapping[str, float]  # by attention kernel
    slowest_share: float
    memory_efficiency: float
    vector_memory_ratio: float  # of the rates of a TPU's vector memory and its main memory
    network_efficiency: float
    network_alpha_seconds: float
    launch_seconds: float
    eager_launch_seconds: float
    eager_memory_share: float
    eager_products_share: float
    launch_bound_share: float
    unpublished_share: float
    steady_spread: float
    power_exponent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """The ends of an interval as shares of the expected value, their source, and why they are no narrower.

    `chips`: the only chips that have it; empty where the chip's rates choose it.
    """

    low: float
    high: float
    words: str
    reason: str = ""
    chips: tuple[str, ...] = ()


@cache
def widths() -> Mapping[str, Width]:
    """Return the interval widths by their names in runs.toml."""
    found: dict[str, Width] = {}
    for name, entry in runs()["interval"].items():
        told = {key: value for key, value in entry.items() if key != "chips"}
        found[name] = Width(**told, chips=tuple(entry.get("chips", ())))
    return found


def ends_with_waits(low: float, high: float, share: float) -> tuple[float, float]:
    """Return the ends of an interval, as shares of the expected time, of a step that waits for messages.

    The width of published runs is mostly of runs that hardly wait. The time of a message is known less well:
    within a factor (`collective` of `[factors.widths]`). Both errors are taken as independent.

    Args:
        share: of the expected time, that of waits for messages.

    >>> [round(end, 3) for end in ends_with_waits(0.9, 1.1, 0.0)]
    [0.9, 1.1]
    >>> [round(end, 3) for end in ends_with_waits(0.9, 1.1, 0.5)]
    [0.81, 1.275]
    """
    ratio: float = runs()["factors"]["widths"]["collective"]
    faster, slower = math.log1p(share / ratio - share), math.log1p(share * ratio - share)
    return math.exp(-math.hypot(math.log(low), faster)), math.exp(math.hypot(math.log(high), slower))


@cache
def shared() -> Shared:
    """Return the shared constants of runs.toml."""
    return Shared(**runs()["shared"])


def names_of(system: str) -> tuple[str, ...]:
    """Return the names of the chips of a measured system; none if no table has it."""
    return _systems()[system][0] if system in _systems() else ()


def sustained_share(chip: Chip) -> float | None:
    """Return the share of its peak that a chip sustains in products of 16 bits or more; None if not known."""
    if (figure := _sustained_figure(chip)) is not None:
        return share_of_peak(figure, chip)
    return runs()["other_tpus"]["share"] if chip.platform == "tpu" else None


def _sustained_figure(chip: Chip) -> Mapping[str, Any] | None:
    """Return the entry of runs.toml for the sustained rate of a chip's silicon; None if there is none."""
    for system, figure in runs()["sustained"].items():
        if chip.name in figure.get("names", ()) or chip.name in names_of(system):
            return figure
    return None


def sustained_in_fleet(chip: Chip, num_devices: int) -> float | None:
    """Return the share of its peak that the slowest of `num_devices` GPUs sustains; the others wait for it.

    A TPU has the share of `sustained_share`, which published runs of whole slices gave.
    """
    share = sustained_share(chip)
    if share is None or chip.platform != "cuda" or num_devices == 1:
        return share
    return share * shared().slowest_share


def attention_of(chip: Chip, kernel: str) -> Mapping[int, AttentionRate]:
    """Return the rates of a library's attention kernel on a chip, or cuDNN's where runs.toml has none.

    Raises:
        InputError: the kernel is unknown.
    """
    kernels = runs()["attention"]
    if kernel != CUDNN and kernel not in kernels:
        known = (CUDNN, *kernels)
        raise InputError(f"no attention kernel {kernel!r} is known", hint=nearest_name(kernel, known))
    if kernel != CUDNN:
        entry, systems = kernels[kernel], _systems()
        for system, share in entry["on"].items():
            if chip.name in systems[system][0]:
                rates = systems[entry["system"]][1].attention
                return {
                    head: replace(rate, efficiency=rate.efficiency * share) for head, rate in rates.items()
                }
    return rates_of(chip).attention


def rates_of(chip: Chip) -> ChipRates:
    """Return the chip's own coefficients, or the median of each coefficient over the measured chips.

    Where others measured large products on an unmeasured chip, their rate sets the efficiency of products. An
    unmeasured chip takes the collectives of the PCIe system with peer-to-peer transfers if its own link is
    PCIe, those of the one that sends through the host if it has no such transfers, those of rings if its own
    links have no switch, else medians over the NVLink systems.
    """
    systems = _systems()
    for names, rates in systems.values():
        if chip.name in names:
            return rates
    measured = [rates for _, rates in systems.values()]
    gemm = _medians(r.gemm for r in measured)
    if (reached := reached_share(chip)) is not None:
        efficiency = reached * (1 + gemm["bf16"].k_half / runs()["products_reached"]["k"])
        gemm["bf16"] = replace(gemm["bf16"], efficiency=efficiency)
    return ChipRates(
        gemm=gemm,
        attention=_medians(r.attention for r in measured),
        collectives=_collectives_like(chip),
        measured=False,
    )


def _collectives_like(chip: Chip) -> Mapping[str, Mapping[int, CollectiveRate]]:
    """Return the collectives of the measured systems whose links are like those of an unmeasured chip."""
    systems = _systems()
    if sends_through_host(chip):
        return systems[_HOST_SYSTEM][1].collectives
    if chip.inside is not None and chip.inside.name.startswith("PCIe"):
        return peer_collectives()
    if chip.inside is not None and chip.inside.by_group:
        return _in_full_rings(systems[_RING_SYSTEM][1].collectives)
    linked = [r for name, (_, r) in systems.items() if name not in (_PEER_SYSTEM, _HOST_SYSTEM)]
    return {kind: _medians(r.collectives[kind] for r in linked) for kind in linked[0].collectives}


def _in_full_rings(
    measured: Mapping[str, Mapping[int, CollectiveRate]],
) -> Mapping[str, Mapping[int, CollectiveRate]]:
    """Return rates at which groups of any size reach the largest group's share, of the few links they have.

    Behind a switch a small group has all links of its members, and does not fill them.
    """
    full = {kind: sizes[max(sizes)].efficiency for kind, sizes in measured.items()}
    return {
        kind: {size: replace(rate, efficiency=full[kind]) for size, rate in sizes.items()}
        for kind, sizes in measured.items()
    }


def sends_through_host(chip: Chip) -> bool:
    """Return whether a chip has no link to its neighbours but through the host's memory."""
    return chip.inside is not None and chip.inside.through_host


def peer_collectives() -> Mapping[str, Mapping[int, CollectiveRate]]:
    """Return the collectives of the PCIe system with peer-to-peer transfers."""
    return _systems()[_PEER_SYSTEM][1].collectives


def reached_share(chip: Chip) -> float | None:
    """Return the share of its 16-bit peak that large products reach where others measured it, else None."""
    reached = runs()["products_reached"]["flops_per_second"].get(chip.name)
    peak = chip.peak_flops_per_second.get("bf16", chip.peak_flops_per_second.get("fp16"))
    return None if reached is None or peak is None else reached / peak


def _medians(tables: Iterable[Mapping[Any, Rate]]) -> dict[Any, Rate]:
    """Return the median of each coefficient, by format, head size or group size."""
    rates_by_key: dict[Any, list[Rate]] = {}
    for table in tables:
        for key, rate in table.items():
            rates_by_key.setdefault(key, []).append(rate)
    medians: dict[Any, Rate] = {}
    for key, rates in sorted(rates_by_key.items()):
        names = [field.name for field in fields(rates[0])]
        median = {name: statistics.median(getattr(rate, name) for rate in rates) for name in names}
        medians[key] = replace(rates[0], **median)
    return medians


@cache
def _systems() -> Mapping[str, tuple[tuple[str, ...], ChipRates]]:
    chips = fitted()["chips"]
    return {system: (tuple(table["names"]), _read(table)) for system, table in chips.items()}


def _read(table: dict[str, Any]) -> ChipRates:
    return ChipRates(
        gemm={name: GemmRate(**fields) for name, fields in table["gemm"].items()},
        attention={int(head): AttentionRate(**fields) for head, fields in table["attention"].items()},
        collectives={
            kind: {int(size): CollectiveRate(**fields) for size, fields in sizes.items()}
            for kind, sizes in table["collectives"].items()
        },
        measured=True,
    )


def with_collectives(
    rates: ChipRates, calibration: Calibration, link: Callable[[int], float | None], devices_per_host: int = 1
) -> ChipRates:
    """Return the rates, with those of each measured kind and group size in place of the table's.

    Args:
        link: a function from the size of a group to the bytes per second of its links.
        devices_per_host: the number of simulated devices that share one rate measured for all; else 1.
    """
    collectives: dict[str, Mapping[int, CollectiveRate]] = dict(rates.collectives)
    for measured in calibration.collectives:
        per_second = link(measured.group_size)
        assert per_second is not None, "a machine with measured collectives has a rate of its link"
        rate = CollectiveRate(
            efficiency=measured.bytes_per_second / devices_per_host / per_second,
            alpha_seconds=measured.latency_seconds,
            ramp_seconds=0.0,
        )
        collectives[measured.kind] = {**collectives[measured.kind], measured.group_size: rate}
    return replace(rates, collectives=collectives)


_NARROW = ("fp8", "fp6", "fp4", "mxfp", "nvfp", "int")  # published runs do not show their clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device of a fleet and its links. All rates are per device.

    `num_sms`: None where no tile or wave quantisation is modelled (TPU, CPU).
    `basis`: the source of the rates: tables | products | default | tpu | other-tpu | roofline | calibration.
    For "products", others measured the rate of large products, and the rest is as for "default". For "tpu",
    published runs on the chip give the rate of products; for "other-tpu", those on other TPUs.
    `through_host`: collectives pass the host's memory, at a rate that was measured on another chip.
    `inside_bytes_per_second`, `between_bytes_per_second`: None where no figure is known.
    `inside_by_group`: those of `Link.by_group` for this domain.
    """

    name: str
    basis: str
    peak_flops_per_second: Mapping[str, float]
    memory_bytes: int | None  # None where it is not known
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
    through_host: bool = False
    backward_attention_share: float = 1.0  # of the forward rate, where attention was not measured
    published_interval: str = ""  # the name in `widths` of published runs in 16 bits on this silicon, if any
    alone: str = ""  # the cards that measured what one device reaches, where the fleet is one
    factors: Factors = NO_FACTORS  # those of `launch_seconds` are in it already
    inside_by_group: Mapping[int, float] = field(default_factory=dict[int, float])

    @property
    def is_tpu(self) -> bool:
        """Return whether the device is a TPU, which runs a program without launching kernels."""
        return self.basis in (TPU, OTHER_TPU)

    @property
    def vector_bytes_per_second(self) -> float:
        """Return the rate of a TPU's vector memory, which is on the chip."""
        return self.memory_bytes_per_second * self.shared.vector_memory_ratio

    def inside_rate(self, members: int) -> float | None:
        """Return the bytes per second of a device's links in a group of `members` devices of its domain."""
        stated = {self.devices_per_domain: self.inside_bytes_per_second, **self.inside_by_group}
        known = [size for size in stated if size <= members]
        return stated[max(known)] if known else self.inside_bytes_per_second

    def gemm_flops_per_second(self, format_name: str) -> float | None:
        """Return the peak that `GemmRate.efficiency` is a share of; None where the chip has no such peak."""
        peak = self.peak_flops_per_second.get(format_name)
        if peak is None or format_name.startswith(_NARROW):
            return peak
        return peak * self.gemm_factor

    def product_seconds(
        self,
        format_name: str,
        *,
        m: Number,
        n: Number,
        k: Number,
        num_bytes: Number,
        batch: Number = 1,
    ) -> Number:
        """Return the seconds of a batch of [m, k] x [k, n] products, never faster than the chip sustains.

        Raises:
            KeyError: the chip has no peak of that format.
        """
        rate, flops = self.rates.gemm_for(format_name), 2 * batch * m * n * k
        peak = self.gemm_flops_per_second(format_name) or self.peak_flops_per_second[format_name]
        per_second = self.memory_bytes_per_second
        if self.is_tpu:  # tiles and clocks are in the sustained rate
            memory = num_bytes / (per_second * self.memory_efficiency)
            return np.maximum(flops / (self.sustained_flops_per_second(format_name) or peak), memory)
        if self.num_sms is None:
            memory = num_bytes / (per_second * rate.memory_efficiency)
            return np.maximum(flops / (peak * rate.efficiency), memory) + rate.start_seconds
        seconds = gemm_seconds(
            rate,
            m=m,
            n=n,
            k=k,
            batch=batch,
            num_bytes=num_bytes,
            flops_per_second=peak,
            memory_bytes_per_second=per_second,
            num_sms=self.num_sms,
        )
        sustained = self.sustained_flops_per_second(format_name)
        return seconds if sustained is None else np.maximum(seconds, flops / sustained)

    def attention_rate(self, head_size: int, length: int, format_name: str, backward: bool) -> AttentionRate:
        """Return the attention kernel's rate as a share of the peak, measured or from the tables.

        A measured rate covers the whole kernel at this length, including its start.
        """
        table = self.rates.attention_for(head_size)
        if self.measured_attention:
            rate = measured_attention(self.measured_attention, table.half_length, head_size, length, backward)
            share = rate / self.peak_flops_per_second[format_name]
            return AttentionRate(efficiency=share, half_length=0.0, start_seconds=0.0)
        share = self.backward_attention_share if backward else 1.0
        return replace(table, efficiency=table.efficiency * share)

    def sustained_flops_per_second(self, format_name: str) -> float | None:
        """Return the rate that no product exceeds for long; None where it is not known."""
        if self.sustained_share is None or format_name.startswith(_NARROW):
            return None
        return self.peak_flops_per_second[format_name] * self.sustained_share


def machine_of(
    fleet: Fleet,
    calibration: Calibration | None,
    attention_kernel: str = CUDNN,
    measured: MeasuredRuns | None = None,
) -> Machine:
    """Return the description of a fleet's devices.

    Args:
        calibration: the measured rates. For a CPU they are all that is known. For an accelerator they take
            precedence over the catalog and the published runs.
        attention_kernel: the library whose attention kernel is priced.
        measured: steps of runs on this chip, to which factors on its predicted seconds are fitted.

    Raises:
        InputError: a CPU without a calibration, a chip whose memory bandwidth the catalog lacks, an unknown
            attention kernel, or runs of another chip.
    """
    machine = _without_factors(fleet, calibration, attention_kernel)
    if measured is None:
        return machine
    if measured.chip != fleet.chip.name:
        raise InputError(f"steps measured on {measured.chip}", hint=f"give those of {fleet.chip.name}")
    before = prior_of(machine, fleet, calibration)
    from meshwright.registry import room  # most users measured nothing

    fit_factors = room("calibration").fit_factors
    factors: Factors = fit_factors(measured, rates_digest(fleet, calibration), before)
    launch_seconds = machine.launch_seconds * factors.of("launch")
    return replace(machine, factors=factors, launch_seconds=launch_seconds)


def launched_one_by_one(machine: Machine, num_devices: int) -> Machine:
    """Return the machine of a fleet as PyTorch's products reach it, in programs without Transformer Engine.

    One device keeps its rate: steps of eager PyTorch on one card reached it.
    """
    if machine.sustained_share is None or num_devices == 1:
        return machine
    share = machine.sustained_share * machine.shared.eager_products_share
    return replace(machine, sustained_share=share)


def prior_of(machine: Machine, fleet: Fleet, calibration: Calibration | None) -> Prior:
    """Return what is assumed of a machine's factors before any step is measured."""
    name = width_name(machine, calibration)
    width = None if name is None else math.sqrt(widths()[name].high / widths()[name].low)
    is_cpu = fleet.chip.platform == "cpu"
    # Published runs on such chips were scored.
    usual = bool(machine.published_interval) or name in ("tables", TPU)
    return before_measuring(runs()["factors"], products=width, is_cpu=is_cpu, usual=usual)


def width_name(machine: Machine, calibration: Calibration | None) -> str | None:
    """Return the name in `widths` of the interval of products in 16 bits; None where no source bounds it."""
    if machine.basis == "roofline":
        return None
    if machine.is_tpu:
        return machine.basis
    return (machine.published_interval if calibration is None else "") or machine.basis


def rates_digest(fleet: Fleet, calibration: Calibration | None) -> str:
    """Return a digest of the rates that price a step on a fleet; factors hold for these rates alone."""
    tables = {name: table for name, table in runs().items() if name not in ("interval", "factors")}
    return digest_of(fleet.chip, calibration, tables, fitted())


def _without_factors(fleet: Fleet, calibration: Calibration | None, attention_kernel: str) -> Machine:
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
    sustained = sustained_in_fleet(chip, fleet.num_devices)
    # JAX's default precision multiplies float32 as TF32 on NVIDIA and as bf16 on a TPU
    # (docs.jax.dev, jax.default_matmul_precision).
    reduced = "tf32" if on_cuda else "bf16" if chip.platform == "tpu" else "fp32"
    machine = Machine(
        name=chip.name,
        basis=_basis(chip, rates.measured),
        peak_flops_per_second=chip.peak_flops_per_second,
        memory_bytes=None if chip.memory_bytes is None else chip.memory_bytes - fleet.reserve_bytes,
        memory_bytes_per_second=chip.memory_bytes_per_second,
        memory_efficiency=common.memory_efficiency,
        num_sms=chip.num_sms,
        launch_seconds=0.0 if chip.platform == "tpu" else common.launch_seconds,
        inside_bytes_per_second=chip.inside.bytes_per_second if chip.inside else None,
        inside_by_group=chip.inside.by_group.get(fleet.chips_per_domain, {}) if chip.inside else {},
        between_bytes_per_second=chip.between.bytes_per_second if chip.between else None,
        host_bytes_per_second=chip.host.bytes_per_second if chip.host else None,
        devices_per_domain=fleet.chips_per_domain,
        rates=rates,
        shared=common,
        gemm_factor=common.factor_without_sustained if sustained is None else 1.0,
        sustained_share=sustained,
        matmul_of_fp32=reduced if reduced in chip.peak_flops_per_second else "fp32",
        through_host=sends_through_host(chip) and not rates.measured,
        backward_attention_share=common.backward_attention_share[attention_kernel if on_cuda else OTHERS],
        published_interval=(_sustained_figure(chip) or {}).get("interval", ""),
    )
    if calibration is None:
        return _as_cards_reached(machine, fleet, attention_kernel)
    # Attention was measured with cuDNN's kernel; another library's kernel has its own rates.
    return _measured(machine, calibration, calibration.attention if attention_kernel == CUDNN else ())


def _as_cards_reached(machine: Machine, fleet: Fleet, attention_kernel: str) -> Machine:
    """Return the machine with the rates of single cards of its silicon, if any were measured.

    A fleet has their attention by cuDNN, and products that last. One device has all that they reached.
    """
    chip = fleet.chip
    system = next((name for name, (chips, _) in _systems().items() if chip.name in chips), None)
    found = single_device_rates(system, chip, attention_kernel)
    if found is None:
        return machine
    if fleet.num_devices > 1:
        return replace(machine, measured_attention=found.attention if attention_kernel == CUDNN else ())
    return replace(
        machine, sustained_share=found.share, measured_attention=found.attention, alone=found.measured
    )


def _basis(chip: Chip, is_measured: bool) -> str:
    if is_measured:
        return "tables"
    if chip.platform == "tpu":
        return TPU if chip.name in runs()["sustained"] else OTHER_TPU
    if chip.platform != "cuda":
        return "roofline"
    return "default" if reached_share(chip) is None else "products"


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
    if calibration.collectives:
        link = machine.inside_bytes_per_second or max(m.bytes_per_second for m in calibration.collectives)
        machine = replace(machine, inside_bytes_per_second=link, through_host=False)
        machine = replace(machine, rates=with_collectives(machine.rates, calibration, machine.inside_rate))
    return replace(
        machine,
        memory_bytes_per_second=calibration.memory_bytes_per_second,
        memory_efficiency=1.0,
        launch_seconds=calibration.launch_seconds,
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
        memory_bytes=fleet.chip.memory_bytes,
        memory_bytes_per_second=memory,
        memory_efficiency=1.0,
        num_sms=None,
        launch_seconds=calibration.launch_seconds_on(fleet.num_devices),
        inside_bytes_per_second=memory / 2,
        between_bytes_per_second=None,
        host_bytes_per_second=None,
        devices_per_domain=fleet.num_devices,
        rates=with_collectives(rates, calibration, lambda _: memory / 2, fleet.num_devices),
        shared=shared(),
        gemm_factor=1.0,
        sustained_share=None,
        matmul_of_fp32="fp32",
    )
