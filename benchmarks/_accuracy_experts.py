"""Write the accuracy page's section on runs with experts: each class, and what each rule of a stack does.

Used by: `accuracy_page`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _published_score import spread
from _row_kinds import counted, kind_in

Row = Mapping[str, Any]
BY_CHOICE, ONCE = "our program, a row for each choice", "a row once to each host and device"
# Rules in the order in which they are added; what has no line here is added last.
RULES = (
    "grouped products",
    "fused kernels",
    "casts in the tables of products",
    "products from latents again",
    "experts' messages waited for",
    "experts' messages beside products",
    "attention by cuDNN's tables",
    "attention in 8 bits",
    "launches that a dispatch waits for",
)
REST = "all else that the stack does otherwise"
HEAD = """## Experts

{count} runs of mixtures of experts, of {configurations} configurations: each release of a source's software
is a run. Their routers are balanced by force, so each is predicted with a capacity factor of 1.0, as the
model that it names. The first columns are of our own program as it is; the others have the rules of its
software, by release (`recipes_of_experts`, `grouped_products`, `attention_of_cudnn`,
`products_without_casts` and `mamba_kernels` in `benchmarks/published_assumptions.toml`, counted in
`benchmarks/_published_grouped.py` and `_published_mamba.py`). The rules were written from that software's
sources, with the errors of the fitted runs in sight. Those of the seen runs were computed afterwards, and
no rule was changed for them.

Two rules took too much from 18 runs that were first seen, and are therefore fitted since 2026-11-29.
Mamba-2's kernels had been priced at the full memory rate; profiles of them on H100 show 0.51 of it, and on
other chips they are taken to differ as the convolution among them was measured to. Experts' messages beside
products had been priced as hidden, but for the multiprocessors that they take. The step now saves 0.44 of
their time, and only where two microbatches are combined. That is one published comparison, on 16 H100, whose
authors warn against taking it for a general speedup. For Blackwell, whose recipes also give messages a stream
of high priority, nothing is published that would say more or less: it is an assumption there, and runs whose
whole step is in a graph became worse by it. Of the runs that these two rules touch, the intervals hold all
but mbridge-264, which had not held before either."""
AFTER = """What each rule changes in {kind} runs, added in this order; median error and bias of each group:"""


def section_of_experts(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the section; none where no row has experts."""
    own = [row for row in rows if row.get("experts")]
    if not own:
        return []
    configurations = {(row["chip"], row["num_devices"], row["configuration"]) for row in own}
    lines = [*HEAD.format(count=len(own), configurations=len(configurations)).splitlines(), ""]
    lines += [
        "| class | kind | runs | our program: median | bias | with rules: median | nine of ten | bias |"
    ]
    lines += ["|" + "---|" * 8]
    for name, group in [*sorted(_grouped(own, "experts").items()), ("all", own)]:
        lines += [_line(name, each) for each in _grouped(group, "kind").values()]
    for kind, group in _grouped(own, "kind").items():
        lines += ["", AFTER.format(kind=kind), "", *_rules(group)]
    return lines


def _rules(own: Sequence[Row]) -> Iterator[str]:
    """Yield the table of what each rule changes in the runs of one kind, by stack and in all."""
    stacks = sorted(_grouped(own, "stack").items(), key=lambda item: -len(item[1]))
    yield f"| after | {' | '.join(f'{name} ({len(group)})' for name, group in stacks)} | all |"
    yield "|" + "---|" * (len(stacks) + 2)
    groups = [*(group for _, group in stacks), own]
    for rule, steps in _steps(groups):
        cells = (f"{100 * each['median']:.1f} %, {100 * each['bias']:+.1f} %" for each in map(spread, steps))
        yield f"| {rule} | {' | '.join(cells)} |"


def _grouped(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[kind_in(row) if key == "kind" else row[key]].append(row)
    return dict(found)


def _line(name: str, rows: Sequence[Row]) -> str:
    ours = spread([_with(row, row["ours_seconds"]) for row in rows])
    found, kinds = spread([dict(row) for row in rows]), " and ".join(counted(rows))
    before = f"{100 * ours['median']:.1f} % | {100 * ours['bias']:+.1f} %"
    after = f"{100 * found['median']:.1f} % | {100 * found['p90']:.1f} % | {100 * found['bias']:+.1f} %"
    return f"| {name} | {kinds} | {len(rows)} | {before} | {after} |"


def _with(row: Row, seconds: float) -> dict[str, Any]:
    """Return a row as if it had been predicted to take `seconds`."""
    return {**row, "error": seconds / row["measured_seconds"] - 1, "kind": kind_in(row)}


def _steps(groups: Sequence[Sequence[Row]]) -> Iterator[tuple[str, list[list[dict[str, Any]]]]]:
    """Yield each rule with the rows of every group as predicted by all rules up to it."""
    yield BY_CHOICE, [[_with(row, row["ours_seconds"]) for row in group] for group in groups]
    known: list[str] = []
    for rule in (ONCE, *RULES):
        known += [rule]
        if rule == ONCE or any(rule in row["otherwise_seconds"] for group in groups for row in group):
            yield rule, [[_with(row, _up_to(row, known)) for row in group] for group in groups]
    yield REST, [[dict(row) for row in group] for group in groups]


def _up_to(row: Row, rules: Sequence[str]) -> float:
    """Return a row's seconds with these rules alone: the last prediction without those that follow."""
    others = sum(seconds for rule, seconds in row["otherwise_seconds"].items() if rule not in rules)
    return float(row["predicted_seconds"] - others)
