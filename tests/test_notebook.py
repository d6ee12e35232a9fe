"""A step in a notebook's cells is weighed with two lines beside the user's own."""

import json
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parent / "scripts" / "notebook.ipynb"
RUN = """
import json, sys
namespace = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), "<cell>", "exec"), namespace)
"""


def test_a_step_is_weighed_in_a_notebook_with_two_lines(tmp_path):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines() if "mw" in line]
    assert lines == [
        "import meshwright as mw",
        'print(mw.weigh(step, args=(state, batch), on="8xH100"))',
    ]
    # A notebook's cells run in one namespace, where functions have no source file.
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "__main__:step on 1xH100" in done.stdout
    assert "FITS" in done.stdout
    assert "One device of 8xH100 works, and 7 stand idle" in done.stdout
