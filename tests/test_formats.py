import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.formats import FORMATS, format_of_dtype

# Independent tables: numpy's and ml_dtypes' own.
ORACLES = {
    "fp64": np.float64,
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8-e5m2": ml_dtypes.float8_e5m2,
    "fp8-e4m3": ml_dtypes.float8_e4m3fn,
    "fp6-e3m2": ml_dtypes.float6_e3m2fn,
    "fp6-e2m3": ml_dtypes.float6_e2m3fn,
    "fp4-e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", ORACLES)
def test_limits_agree_with_the_library_that_has_the_format(name: str):
    ours, theirs = FORMATS[name], ml_dtypes.finfo(ORACLES[name])
    assert ours.bits == theirs.bits
    assert (ours.exponent_bits, ours.mantissa_bits) == (theirs.nexp, theirs.nmant)
    assert ours.max == float(theirs.max)
    assert ours.smallest_normal == float(theirs.smallest_normal)
    assert ours.smallest_subnormal == float(theirs.smallest_subnormal)
    assert ours.epsilon == float(theirs.eps)


@pytest.mark.parametrize("name", ORACLES)
@given(value=st.floats(allow_nan=False, width=32))
def test_rounding_agrees_with_the_library_that_has_the_format(name: str, value: float):
    if not math.isfinite(value):
        return
    with np.errstate(over="ignore"):
        theirs = float(np.array(value, np.float32).astype(ORACLES[name]))
    np.testing.assert_equal(FORMATS[name].round_trip(value), theirs)


@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-e5m2", "fp4-e2m1", "fp6-e3m2", "fp6-e2m3"])
def test_every_pattern_of_a_narrow_format_is_kept(name: str):
    patterns = np.arange(2 ** FORMATS[name].bits, dtype=np.uint8).view(ORACLES[name]).astype(np.float64)
    for value in patterns:
        np.testing.assert_equal(FORMATS[name].round_trip(float(value)), float(value))


@pytest.mark.parametrize("name", [n for n in FORMATS if "int" in n])
def test_integers_agree_with_numpy(name: str):
    theirs = ml_dtypes.iinfo(getattr(ml_dtypes if name.endswith("int4") else np, name))
    assert FORMATS[name].bits == theirs.bits
    assert FORMATS[name].max == float(theirs.max)


def test_tf32_has_the_range_of_fp32_and_the_step_of_fp16():
    assert FORMATS["tf32"].smallest_normal == FORMATS["fp32"].smallest_normal == 2.0**-126
    assert FORMATS["tf32"].epsilon == FORMATS["fp16"].epsilon == 2.0**-10
    assert FORMATS["tf32"].max == (2 - 2.0**-10) * 2.0**127


def test_a_small_gradient_is_lost_in_fp16_and_kept_in_bf16():
    assert FORMATS["fp16"].round_trip(1e-8) == 0
    assert FORMATS["bf16"].round_trip(1e-8) == pytest.approx(1e-8, rel=2**-8)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("mxfp8", 8.25), ("mxfp6-e3m2", 6.25), ("mxfp6-e2m3", 6.25), ("mxfp4", 4.25), ("nvfp4", 4.5)],
)
def test_a_block_format_pays_for_its_scale(name: str, bits: float):
    assert FORMATS[name].bits_per_value == bits  # OCP MX 1.0: 8 bits for 32 values; NVFP4: 8 for 16


def test_infinities_and_nan_stay_what_they_are():
    assert FORMATS["bf16"].round_trip(-math.inf) == -math.inf
    assert math.isnan(FORMATS["fp8-e4m3"].round_trip(math.nan))


@pytest.mark.parametrize("asked", ["int8", "mxfp4"])
def test_asking_for_a_rounding_that_is_not_defined_is_our_own_bug(asked: str):
    with pytest.raises(AssertionError, match=asked):
        FORMATS[asked].round_trip(1.0)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bfloat16", "bf16"),
        ("bf16", "bf16"),
        ("f32", "fp32"),
        ("float64", "fp64"),
        ("f8e4m3fn", "fp8-e4m3"),
        ("float8_e5m2", "fp8-e5m2"),
        ("s32", "int32"),
        ("u8", "uint8"),
        ("pred", "bool"),
        ("int32", "int32"),
    ],
)
def test_dtypes_are_found_by_the_names_of_numpy_jax_and_xla(dtype: str, name: str):
    assert format_of_dtype(dtype).name == name


@pytest.mark.parametrize("dtype", [*ORACLES.values(), np.int32, np.uint8, np.bool_, ml_dtypes.int4])
def test_the_width_of_a_dtype_is_numpys(dtype: type):
    known = format_of_dtype(np.dtype(dtype).name)
    assert np.dtype(dtype).itemsize == -(-known.bits // 8)


def test_an_unknown_dtype_names_the_nearest():
    with pytest.raises(InputError, match="unknown number format 'bfloat61'") as refused:
        format_of_dtype("bfloat61")
    assert "bfloat16" in refused.value.hint
