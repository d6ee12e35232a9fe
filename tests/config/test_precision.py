"""Which chips may run which precision."""

import pytest

from meshwright.config import check_precision, load_config
from meshwright.errors import InputError
from meshwright.hardware import Fleet


@pytest.mark.parametrize("chip", ["A100", "V100"])
def test_a_chip_without_fp8_units_is_refused_by_name(chip):
    config = load_config("bytes-nano", ("precision=fp8",))
    with pytest.raises(InputError, match=r"fp8-e4m3 and fp8-e5m2, for which .*100.* has no units") as caught:
        check_precision(config, Fleet.parse(f"1x{chip}").chip)
    assert "fp16" in caught.value.message  # what it has
    assert "or a chip that has them" in caught.value.hint


@pytest.mark.parametrize(("precision", "fleet"), [("fp8", "v4-8"), ("fp16", "v5p-8")])
def test_a_tpu_without_the_units_is_refused(precision, fleet):
    with pytest.raises(InputError, match="has no units"):
        check_precision(load_config("bytes-nano", (f"precision={precision}",)), Fleet.parse(fleet).chip)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("fleet", ["1xH100", "8xCPU"])
def test_a_chip_with_the_units_and_a_cpu_take_any_precision(precision, fleet):
    check_precision(load_config("bytes-nano", (f"precision={precision}",)), Fleet.parse(fleet).chip)


def test_a_model_without_products_in_eight_bits_is_refused():
    with pytest.raises(InputError, match="cruncher model has no products in eight bits"):
        load_config("cruncher", ("precision=fp8",))
    with pytest.raises(InputError, match="experts have no products in eight bits"):
        load_config("bytes-moe", ("precision=fp8",))
