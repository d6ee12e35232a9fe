import pytest

from meshwright.config import load_config
from meshwright.errors import InputError


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rate=0", "learning_rate"),
        ("optimizer.beta1=1.0", "beta1"),
        ("optimizer.kind=adamx", "adamw"),
        ("schedule.final_fraction=1.5", "final_fraction"),
    ],
)
def test_figures_that_make_no_optimizer_are_refused(override, words):
    with pytest.raises(InputError, match=words):
        load_config("bytes-10m", [override])
