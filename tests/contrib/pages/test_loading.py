import subprocess
import sys

LOAD = """
import sys
from meshwright.contrib.pages import loading_plots
{before}
with loading_plots():
    assert "jax" not in sys.modules
print("matplotlib.figure" in sys.modules)
"""


def loaded(before: str = "") -> str:
    command = [sys.executable, "-c", LOAD.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_what_draws_plots_is_loaded_when_the_block_ends():
    assert loaded() == "True\n"


def test_a_broken_matplotlib_is_left_to_the_page_to_report():
    assert loaded("sys.modules['matplotlib'] = None") == "False\n"
