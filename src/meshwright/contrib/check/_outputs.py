"""Write a check for those who read it: a terminal, JUnit, SARIF, GitHub's annotations and a comment."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from meshwright.errors import printable
from meshwright.report import Document, ReportTable, TableRow, Tone, Words, section
from meshwright.units import format_bytes

from ._check import NOT_WEIGHED, OVER, WITHIN, Check, Checked
from ._difference import amount_words

MARKER = "<!-- meshwright check -->"
"""The first line of the comment, by which the next run finds it."""
LONGEST_COMMENT = 65_000  # characters; GitHub refuses 65,537
BAR = 24  # characters of a bar
MOST_FILES = 200_000  # of a repository, among which a source file is looked for


def check_document(made: Check) -> Document:
    """Return one row for each budget, then what is over and why."""
    tones: dict[str, Tone] = {WITHIN: "good", OVER: "bad", NOT_WEIGHED: "warning"}
    rows = [
        TableRow(
            cells=(each.budget.name, each.state, *_cells(each)), tone="" if each.state == WITHIN else "strong"
        )
        for each in made.budgets
    ]
    columns = ("budget", "state", "memory", "FLOPs", "step")
    worst = max((each.state for each in made.budgets), key=list(tones).index, default=WITHIN)
    reasons = (
        part
        for each in made.budgets
        if each.reasons or (each.difference is not None and not each.difference.is_nothing)
        for part in section(each.budget.name, *(Words(text=text) for text in _reasons(each)))
    )
    return Document(
        title=made.line,
        sections=(
            *section("", Words(text=made.line, tone=tones[worst])),
            *section(
                "Budgets", ReportTable(columns=columns, rows=tuple(rows), numbers=columns[2:], unbroken=2)
            ),
            *reasons,
        ),
    )


def _cells(each: Checked) -> tuple[str, str, str]:
    figures = each.figures
    if figures is None or figures.refused:
        return "", "", ""
    step = "" if figures.step_seconds is None else amount_words(figures.step_seconds, "seconds")
    return amount_words(figures.num_bytes, "bytes"), amount_words(figures.num_flops, "FLOPs"), step


def _reasons(each: Checked) -> list[str]:
    """Return what is over; where it is; and what moved since the other commit."""
    texts = list(each.reasons)
    for held in each.held:
        if held.state == OVER and (found := each.places(held.limit.name)):
            (line, what, module), amount = found[0]
            where = " ".join(filter(None, (line, module)))
            most = "it grew most" if each.difference is not None else "the largest part is"
            words = amount_words(amount, held.limit.unit)
            texts.append(
                f"{held.limit.name}: {most} at {where or 'no known line'}: {words} {what}".replace("_", " ")
            )
    if each.difference is not None and not each.difference.is_nothing:
        texts += each.difference.sentences
    return texts


def junit_of(made: Check) -> str:
    """Return the check in JUnit's XML: a failure for what is over, an error for what could not be weighed."""
    counts = {state: str(sum(each.state == state for each in made.budgets)) for state in (OVER, NOT_WEIGHED)}
    suite = ElementTree.Element(
        "testsuite",
        name="meshwright check",
        tests=str(len(made.budgets)),
        failures=counts[OVER],
        errors=counts[NOT_WEIGHED],
    )
    for each in made.budgets:
        case = ElementTree.SubElement(
            suite, "testcase", classname=str(made.file), name=_xml(each.budget.name)
        )
        if each.state != WITHIN:
            kind = "failure" if each.state == OVER else "error"
            inner = ElementTree.SubElement(case, kind, message=_xml(each.reasons[0]) if each.reasons else "")
            inner.text = _xml("\n".join(_reasons(each)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Return a text without the characters that XML cannot hold."""
    return printable(text)


def sarif_of(made: Check) -> str:
    """Return the check as SARIF 2.1.0: a result for each limit that is over, on the line that grew most."""
    results: list[dict[str, Any]] = []
    files = _files_by_name()
    for each in made.budgets:
        for name, text, state in _problems(each):
            result: dict[str, Any] = {
                "ruleId": name.partition(".")[0],
                "level": "error" if state == OVER else "warning",
                "message": {"text": f"{each.budget.name}: {text}"},
            }
            path, line = _location(each, name, files) or (str(made.file), 1)
            place = {"artifactLocation": {"uri": path}, "region": {"startLine": line}}
            result["locations"] = [{"physicalLocation": place}]
            results.append(result)
    rules = [{"id": name} for name in sorted({each["ruleId"] for each in results})]
    driver = {
        "name": "meshwright",
        "rules": rules,
    }
    tree = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(tree, indent=1) + "\n"


def _problems(each: Checked) -> list[tuple[str, str, str]]:
    """Return what is wrong with a budget: the name of the limit, the words and the state."""
    if each.figures is None or each.figures.refused or each.lost_fit:
        return [("fits", "; ".join(each.reasons), each.state)]
    return [(held.limit.name, held.words, held.state) for held in each.held if held.state != WITHIN]


def _location(each: Checked, name: str, files: dict[str, list[str]]) -> tuple[str, int] | None:
    """Return the path and the line of the largest part of a quantity in a file of the repository."""
    for (place, _, _), _ in each.places(name):
        file, _, line = place.partition(":")
        if file and line.isdecimal() and len(found := files.get(file, [])) == 1:
            return found[0], int(line)
    return None


def _files_by_name() -> dict[str, list[str]]:
    """Return the paths of the repository's files by their names; nothing where there is no repository."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in done.stdout.decode(errors="replace").split("\0")[:MOST_FILES]:
        found[Path(path).name].append(path)
    return dict(found)


def annotations_of(made: Check) -> str:
    """Return GitHub's workflow commands: an error or a warning on the line of each limit that is not kept.

    https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
    """
    lines: list[str] = []
    files = _files_by_name()
    for each in made.budgets:
        for name, text, state in _problems(each):
            path, line = _location(each, name, files) or (str(made.file), 1)
            kind = "error" if state == OVER else "warning"
            where = f"file={_escaped(path, True)},line={line},title={_escaped(each.budget.name, True)}"
            lines.append(f"::{kind} {where}::{_escaped(text)}\n")
    return "".join(lines)


def _escaped(text: str, is_property: bool = False) -> str:
    """Return a text as a workflow command takes it."""
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(sign, code)
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text


def comment_of(made: Check) -> str:
    """Return the check as a comment in Markdown of at most `LONGEST_COMMENT` characters.

    It is empty where all budgets are within and, compared with another commit, nothing moved.
    """
    moved = [each for each in made.budgets if each.difference is not None and not each.difference.is_nothing]
    if made.status == 0 and not moved:
        return ""
    lines = [
        MARKER,
        f"### {_markdown(made.line)}",
        "",
        "| budget | state | memory | FLOPs | step |",
        "|-|-|-|-|-|",
    ]
    lines += [
        "| " + " | ".join(map(_markdown, (each.budget.name, each.state, *_cells(each)))) + " |"
        for each in made.budgets
    ]
    for each in made.budgets:
        if each.state == WITHIN and each not in moved:
            continue
        lines += [
            "",
            f"**{_markdown(each.budget.name)}**",
            *(f"* {_markdown(text)}" for text in _reasons(each)),
        ]
        lines += _bars(each)
    text = "\n".join(lines) + "\n"
    if len(text) > LONGEST_COMMENT:
        end = "\n```\nThe rest is in the job's summary.\n"
        text = text[: LONGEST_COMMENT - len(end)] + end
    return text


def _bars(each: Checked) -> list[str]:
    """Return a picture in text: the memory of a device by category, before and now."""
    if each.figures is None or not each.figures.memory:
        return []
    now = each.figures.memory
    before = each.difference.before.memory if each.difference is not None else {}
    largest = max([*now.values(), *before.values(), 1])
    rows = ["", "```text"]
    for name in sorted({*now, *before}, key=lambda name: -max(now.get(name, 0), before.get(name, 0)))[:8]:
        for side, sizes in (("before", before), ("now", now)):
            if side == "before" and not before:
                continue
            size = sizes.get(name, 0)
            bar = "#" * round(BAR * size / largest)
            label = name.replace("_", " ") if side == "now" or not before else ""
            rows.append(f"{label[:24]:24} {side:6} {bar:{BAR}} {format_bytes(size)}")
    return [*rows, "```"]


def _markdown(text: str) -> str:
    """Return a text that Markdown shows as it is: no markup, no HTML, no mention of anybody."""
    cleaned = printable(text).replace("\n", " ")
    for sign in "\\`*_{}[]<>#|":
        cleaned = cleaned.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return cleaned.replace("@", "@\u200b")
