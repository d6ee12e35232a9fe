import pytest

from meshwright.config import load_config
from meshwright.errors import InputError


@pytest.mark.parametrize("fraction", ["0", "0.6"])
def test_at_most_half_of_the_data_is_held_out_and_at_least_some(fraction):
    with pytest.raises(InputError, match="held_out_fraction"):
        load_config("bytes-nano", [f"data.held_out_fraction={fraction}"])
