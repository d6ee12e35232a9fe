"""The primer covers every section of its four documents, and each page has the parts of a lesson."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import meshwright
from tests import commands

PRIMER = Path(__file__).parents[1] / "docs/tutorials/primer"
# The sections of the documents, by their names: functions, headings, or topics.
SECTIONS = {
    "lecture notes": """
        tensors_memory | float32 | float16 | bfloat16 | fp8 | get_memory_usage | tensors_on_gpus | get_device
        | tensor_operations | tensor_storage | tensor_slicing | same_storage | tensor_elementwise
        | tensor_matmul | tensor_einops | einops_motivation | jaxtyping_basics | einops_einsum | einops_reduce
        | einops_rearrange | tensor_operations_flops | the linear model's FLOPs | other operations' FLOPs
        | time_matmul | get_promised_flop_per_sec | model FLOPs utilisation | gradients_basics
        | gradients_flops | module_parameters | parameter initialisation | custom_model | Linear | Cruncher
        | get_num_parameters | get_batch | pinned memory | data_loading | note_about_randomness | SGD
        | AdaGrad | optimizer | optimizer: memory | optimizer: compute | optimizer: Transformers | train_loop
        | train | checkpointing | mixed_precision_training
    """,
    "pmap notes": """
        from vmap to pmap | in_axes | compiled without jit | axis names and nesting
        | least squares on several devices | a loss of shape [devices]
    """,
    "JAX guide": """
        host-local inputs of pjit | a dimension that does not divide | host-local arrays to global and back
        | replicated inputs | FROM_GDA and jax.Array | live_buffers and live_arrays | RecursionError
        | asynchronous dispatch | concurrency
    """,
    "notes on several GPUs": """
        detection | tensors on two devices | data, model and channel parallelism | LeNet | get_params
        | allreduce | scatter and split_batch | train_batch | train | ResNet-18 | DataParallel
        | several machines
    """,
}
WANTED = [
    (document, " ".join(section.split()))
    for document, sections in SECTIONS.items()
    for section in sections.split("|")
]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| \[([^]]+)\]\(([^)]+)\) \| `([^`]+)` \|$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the primer's table."""

    document: str
    section: str
    title: str
    page: Path
    call: str


TABLE = [
    Row(document=match[1], section=match[2], title=match[3], page=PRIMER / match[4], call=match[5])
    for match in ROW.finditer((PRIMER / "index.md").read_text())
]


def test_every_section_of_the_documents_has_one_row():
    assert sorted((row.document, row.section) for row in TABLE) == sorted(WANTED)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.document}: {row.section}")
def test_the_page_of_a_section_is_there_and_makes_the_call(row: Row):
    text = row.page.read_text()
    assert text.startswith(f"# {row.title[0].upper()}{row.title[1:]}\n")
    code = "\n".join(re.findall(r"^```\w+\n(.*?)^```$", text, re.M | re.S))
    assert re.search(rf"(^|\W){re.escape(row.call)}(\(|$|\s)", code, re.M)
    if row.call.startswith("mw."):
        assert callable(getattr(meshwright, row.call.removeprefix("mw.")))


PAGES = sorted(PRIMER.glob("[0-9]*.md"))


def test_every_page_of_the_primer_is_in_the_table():
    assert {row.page for row in TABLE} == set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_a_lesson(page: Path):
    text = page.read_text()
    opening = text.partition("```python")[0]
    assert re.search(r"^# .+\n\nOn this page you learn:\n\n(\* .+\n){2,}", opening)
    assert re.search(r"^(```text\n|!\[)", text, re.M)  # a picture
    assert "**Common mistake:**" in text
    results = re.findall(r"^```python\n((?:(?!^```).*\n)*)^```\n\n```text\n", text, re.M)
    assert any("print(" in block for block in results)
    lesson, heading, checks = text.partition("## Check it yourself\n")
    assert heading
    assert "assert" in checks
    blocks = re.findall(r"^```python\n(.*?)^```$", lesson, re.M | re.S)
    shown = "".join(block for block in blocks if not block.startswith("# file: "))
    assert not re.findall(r"^\s*assert\b.*", shown, re.M)


def test_the_commands_of_the_table_are_commands():
    done = commands.run("--help")
    verbs = {row.call.split()[1] for row in TABLE if row.call.startswith("meshwright ")}
    assert verbs
    assert not {verb for verb in verbs if verb not in done.output}
