"""Describe number formats: the range and precision that follow from exponent and mantissa bits.

Sources: IEEE 754-2019 (fp16, fp32, fp64); OCP "8-bit Floating Point Specification" 1.0 (fp8); OCP
"Microscaling Formats (MX) Specification" 1.0 (mxfp8, mxfp6, mxfp4 and their elements); NVIDIA's
description of NVFP4 (blocks of 16 with an fp8-e4m3 scale). Counted: rounding to nearest even.
Not counted: stochastic rounding, flush-to-zero units, the rounding of a block with its scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import InputError, nearest_name


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """One number format.

    `bits`: storage of one value, without a block's scale (tf32 uses 19 of its 32 bits).
    `has_inf`, `has_nan`: both if the largest exponent is reserved for them (IEEE); only `has_nan` if only
    the all-ones pattern is NaN (fp8-e4m3); neither for the narrow element formats.
    `block_size`, `scale_bits`: the number of values that share one scale, and its bits; 1 and 0 without one.
    An integer has no exponent bits; its mantissa bits are those of its magnitude.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    has_inf: bool = False
    has_nan: bool = False
    block_size: int = 1
    scale_bits: int = 0

    @property
    def is_float(self) -> bool:
        """True for floating-point formats, which have an exponent."""
        return self.exponent_bits > 0

    @property
    def bits_per_value(self) -> float:
        """Bits of one value, including its share of the block's scale."""
        return self.bits + self.scale_bits / self.block_size

    @property
    def _bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def _largest_exponent(self) -> int:
        return self._bias if self.has_inf else self._bias + 1

    @property
    def max(self) -> float:
        """The largest finite value, of one element before its scale."""
        if not self.is_float:
            return float(2**self.mantissa_bits - 1)
        lost = 2 if self.has_nan and not self.has_inf else 1  # mantissa steps below 2; NaN takes one
        return math.ldexp(2 - lost * self.epsilon, self._largest_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a full mantissa."""
        return math.ldexp(1, 1 - self._bias) if self.is_float else 1.0

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return math.ldexp(1, 1 - self._bias - self.mantissa_bits) if self.is_float else 1.0

    @property
    def epsilon(self) -> float:
        """The step from 1 to the next value."""
        return math.ldexp(1, -self.mantissa_bits) if self.is_float else 1.0

    def round_trip(self, value: float) -> float:
        """Return `value` after it is stored in this format and read back, without a block's scale.

        A value beyond `max` becomes infinite if the format has infinities, else NaN if it has NaN, else
        `max`, as in XLA's conversion.

        >>> FORMATS["fp16"].round_trip(1e-8)
        0.0
        """
        assert self.is_float, f"{self.name} is not a floating-point format"
        assert self.block_size == 1, f"{self.name}: the result depends on the largest value of the block"
        if value == 0 or not math.isfinite(value):
            return value
        exponent = max(math.frexp(value)[1] - 1, 1 - self._bias)
        step = math.ldexp(1, exponent - self.mantissa_bits)
        rounded = round(abs(value) / step) * step
        if rounded > self.max:
            rounded = math.nan if self.has_nan else self.max
            if self.has_inf:
                rounded = math.inf
        return math.copysign(rounded, value)


_ALL = (
    *(
        NumberFormat(
            name=name,
            bits=bits,
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            has_inf="inf" in specials,
            has_nan="nan" in specials,
            block_size=block_size,
            scale_bits=scale_bits,
        )
        for name, bits, exponent_bits, mantissa_bits, specials, block_size, scale_bits in (
            ("fp64", 64, 11, 52, "inf nan", 1, 0),
            ("fp32", 32, 8, 23, "inf nan", 1, 0),
            ("tf32", 32, 8, 10, "inf nan", 1, 0),
            ("bf16", 16, 8, 7, "inf nan", 1, 0),
            ("fp16", 16, 5, 10, "inf nan", 1, 0),
            ("fp8-e5m2", 8, 5, 2, "inf nan", 1, 0),
            ("fp8-e4m3", 8, 4, 3, "nan", 1, 0),
            ("fp6-e3m2", 6, 3, 2, "", 1, 0),
            ("fp6-e2m3", 6, 2, 3, "", 1, 0),
            ("fp4-e2m1", 4, 2, 1, "", 1, 0),
            ("mxfp8", 8, 4, 3, "nan", 32, 8),
            ("mxfp6-e3m2", 6, 3, 2, "", 32, 8),
            ("mxfp6-e2m3", 6, 2, 3, "", 32, 8),
            ("mxfp4", 4, 2, 1, "", 32, 8),
            ("nvfp4", 4, 2, 1, "", 16, 8),
        )
    ),
    *(
        NumberFormat(name=f"{sign}int{bits}", bits=bits, exponent_bits=0, mantissa_bits=bits - (not sign))
        for sign in ("", "u")
        for bits in (4, 8, 16, 32, 64)
    ),
    NumberFormat(name="bool", bits=8, exponent_bits=0, mantissa_bits=1),
)

FORMATS = {f.name: f for f in _ALL}
"""Every format by its name, widest floats first."""

# Names in numpy, jax and ml_dtypes, and XLA's names if they differ.
_DTYPES = {
    **{n: n for n in FORMATS},
    **{"float64": "fp64", "f64": "fp64", "float32": "fp32", "f32": "fp32"},
    **{"float16": "fp16", "f16": "fp16", "bfloat16": "bf16"},
    **{"float8_e5m2": "fp8-e5m2", "f8e5m2": "fp8-e5m2", "float8_e4m3fn": "fp8-e4m3", "f8e4m3fn": "fp8-e4m3"},
    **{"float6_e3m2fn": "fp6-e3m2", "float6_e2m3fn": "fp6-e2m3"},
    **{"float4_e2m1fn": "fp4-e2m1", "f4e2m1fn": "fp4-e2m1", "pred": "bool"},
    **{f"s{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (4, 8, 16, 32, 64)},
}


def format_of_dtype(dtype: str) -> NumberFormat:
    """Return the format of a dtype, named as in numpy, jax or XLA: "bfloat16", "bf16", "f32", "s32", "pred".

    Raises:
        InputError: no format has that name.

    >>> format_of_dtype("bfloat16").name
    'bf16'
    """
    name = _DTYPES.get(dtype.lower())
    if name is None:
        raise InputError(f"unknown number format {dtype!r}", hint=nearest_name(dtype, _DTYPES))
    return FORMATS[name]
