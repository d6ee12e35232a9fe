"""A step in a notebook is weighed with two lines beside the user's own; eight cells of a newcomer read well.

No kernel of Jupyter is installed with the tests: `KERNEL` shows values and errors as IPython does, which asks
an object for `_repr_html_` and `repr`, and an error for `_render_traceback_`.
"""

import html
import importlib.metadata
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
        'print(mw.weigh(mw.jax_step(step, state, batch), on="8xH100"))',
    ]
    # A notebook's cells run in one namespace, where functions have no source file.
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "__main__:step on 1xH100" in done.stdout
    assert "FITS" in done.stdout
    assert "One device of 8xH100 works, and 7 stand idle" in done.stdout


KERNEL = """
import ast, importlib.util, json, sys, traceback
namespace = {"__name__": "__main__"}
shown = []
for cell in json.load(open(sys.argv[1]))["cells"]:
    text = "".join(cell["source"])
    if "# needs torch" in text and importlib.util.find_spec("torch") is None:
        shown.append(None)
        continue
    *body, last = ast.parse(text).body
    ends = isinstance(last, ast.Expr)
    value, page, error = None, None, None
    try:
        exec(compile(ast.Module([*body, *([] if ends else [last])], []), "<cell>", "exec"), namespace)
        if ends:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            page = value._repr_html_() if hasattr(value, "_repr_html_") else None
    except Exception as failed:
        own = getattr(failed, "_render_traceback_", None)
        error = own() if own else traceback.format_exc().splitlines()
    shown.append({"repr": None if value is None else repr(value), "page": page, "error": error})
print("SHOWN", json.dumps(shown))
"""


def test_eight_cells_of_a_newcomer_read_well(tmp_path):
    notebook = NOTEBOOK.with_name("newcomer.ipynb")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, str(notebook)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    printed, _, shown = done.stdout.partition("SHOWN ")
    version, _, weighing, _, figures, refused, module, last = json.loads(shown)
    assert version["repr"] == repr(importlib.metadata.version("meshwright"))
    assert "FITS" in printed
    for cell in (weighing, module, last):
        if cell is not None:  # the cell of PyTorch where it is not installed
            assert cell["error"] is None
            assert len(cell["repr"]) < 500
            assert "\n" not in cell["repr"]
    assert weighing["repr"].startswith("<Weighing: __main__:step on 1xH100, layout data=1: fits, ")
    for cell in (weighing, module):
        if cell is not None:
            assert "class=framed" in html.unescape(cell["page"])
    assert all(float(number) >= 0 for number in figures["repr"].strip("()").split(", "))
    *_, message, hint = refused["error"]
    assert message.startswith("InputError: ")
    assert "H1000" in message
    assert hint.startswith("  hint: ")
    assert len(refused["error"]) <= 3
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")
    assert "<body>" in (tmp_path / "step.html").read_text()
