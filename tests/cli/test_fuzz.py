"""A thousand bad command lines, each made from its number: words and a documented status, whatever is asked.

Nothing is compiled, measured or started: what would do so ends with an error of its own instead.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.errors import CompileError

CPU_SECONDS = 30.0  # of one case; the slowest takes two on an idle machine, with its imports
STATUSES = {0, 1, 2, 3, 130}  # as `cli/_app.py` documents them, without 4: an error nobody foresaw
CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")

# Good values, by the option that they are for; and bad ones, which any option may be given.
# ruff: noqa: SIM905  lists of words read best as text
PRESETS = "linear bytes-nano llama3-8b mixtral-8x7b lenet resnet18-fashion cruncher line gpt2-124m".split()
FLEETS = "8xCPU 8xH100 1xCPU 64xH100 v5p-512 16x4xA100-80GB 8xMI300X local".split()
LAYOUTS = "data=8 fsdp=8 data=-1 tensor=8 fsdp=4,tensor=2 stage=2,data=4 context=2,data=4 expert=8".split()
VALUES = {
    "model.num_layers": "1 2 4 33",
    "model.num_heads": "4 7 16",
    "model.num_kv_heads": "1 3 8 1000003",
    "model.embed_dim": "64 96 1000",
    "model.head_dim": "1 2 64",
    "model.vocab_size": "2 256 50257",
    "model.loss_chunk": "1 100 512 1000003",
    "model.num_experts": "8 none",
    "model.kind": "linear transformer",
    "batch.sequences": "1 8 64 1000003",
    "batch.sequence_length": "1 128 1000003",
    "batch.microbatch_sequences": "1 2 none",
    "batch.base_sequences": "64",
    "optimizer.learning_rate": "0.1 1e-3",
    "optimizer.kind": "adamw sgd muon",
    "schedule.warmup_steps": "0 3",
    "schedule.scale": "linear none",
    "data.path": "tokens.bin text.txt",
    "data.source": "synthetic tokens idx",
    "data.folder": "run",
    "layout": "fsdp=8 data=8",
    "precision": "fp8 fp16 fp32",
    "offload": "both",
    "remat": "none full dots",
    "seed": "0 7",
    "steps": "1 10",
}
NUMBERS = "1 2 8 100".split()
TEXTS = "text.txt lines.jsonl".split()
RUNS = "run junk damaged".split()
NEW = "made made.bin new/made".split()
FUNCTIONS = "module:fails module:quits module:red module:nothing module:cruncher".split()

DIGITS = "9" * 5000
HUGE = [*map(str, (2**31, 2**32, 2**63, 2**64, 10**400)), DIGITS, "-" + DIGITS, "0x" + "f" * 6000]
BAD_NUMBERS = [*HUGE, *"0 -1 1e3 1.5 nan inf -inf 1e999 1_000 \u0663".split()]
BAD_WORDS = [
    *"[ ] {} = , : :: - -- . * %s a:b os:_nothing none true [/] [red] \u65e5\u672c a/b/c".split(),
    *("", " ", "\x1b[31mred", "\x1b]0;t\x07", "\r", "\u202e", "\udcff", "a\0b", "x" * 300, "x" * 5000),
    *("/dev/null", "/dev/full", "/proc/self/mem", "/proc/no/where"),
    *("[" * 5000, "{a=" * 3000, '"\\u0000"', "'"),
]
BAD_FILES = [f"{n}.toml" for n in "deep wide long hex nul binary loop folder nowhere \x1b".split(" ")]
BAD_FILES += ["y" * 300 + ".toml", *"deep.jsonl long.jsonl empty.txt nowhere link".split()]
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    *({},) * 12,
    {"COLUMNS": "0"},
    {"COLUMNS": "1"},
    {"COLUMNS": DIGITS},
    {"COLUMNS": "-3", "LINES": "0"},
    {"MESHWRIGHT_CACHE_DIR": "text.txt"},
    {"MESHWRIGHT_CACHE_DIR": "/dev/null/x"},
    {"MESHWRIGHT_CACHE_DIR": "z" * 5000},
    {"MESHWRIGHT_CACHE_BYTES": DIGITS},
    {"MESHWRIGHT_CACHE_BYTES": "-1"},
    {"NO_COLOR": "1", "TERM": "dumb"},
)


class Hang(BaseException):
    """A case has used its processor time."""


class Choices:
    """The command line of one case, drawn from a generator of its own: mostly good, here and there bad."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._badness = self._random.choice((0.05, 0.2, 0.6))
        self.verb = self._random.choice(list(VERBS))
        self.environment = self._random.choice(ENVIRONMENTS)
        self.arguments = [*self.verb.split(), *VERBS[self.verb](self)]
        if self.often(0.3):
            self.arguments.append("--json")
        if self.often(0.02):
            self.arguments.append("--help")
        if self.often(self._badness / 4):
            place = self._random.randint(0, len(self.arguments))
            self.arguments.insert(place, self.one(["--nothing", "--on", "-x"], BAD_WORDS, BAD_NUMBERS))

    def one(self, good: list[str], *bad: list[str]) -> str:
        """One of `good`, or now and then of one of the lists `bad`."""
        return self._random.choice(self._random.choice(bad) if self.often(self._badness) else good)

    def often(self, share: float) -> bool:
        return self._random.random() < share

    def config(self) -> str:
        return self.one(PRESETS, BAD_FILES, BAD_WORDS, ["module:fails", "module:", ":f", "ok.toml"])

    def fleet(self) -> str:
        broken = [f"{number}xH100" for number in BAD_NUMBERS] + [f"v5p-{number}" for number in BAD_NUMBERS]
        return self.one(FLEETS, broken, BAD_WORDS, ["8xnothing", "H100", "2x3x4xCPU", "1000003xCPU"])

    def layout(self) -> str:
        broken = [f"data={number},fsdp=-1" for number in BAD_NUMBERS] + ["data=8,data=1", "data=-1,fsdp=-1"]
        return self.one(LAYOUTS, broken, BAD_WORDS, [",".join(["data=8"] * 3000), "stage=1000003"])

    def number(self) -> str:
        return self.one(NUMBERS, BAD_NUMBERS, BAD_WORDS)

    def word(self) -> str:
        return self.one(NEW, BAD_WORDS, BAD_FILES, RUNS)

    def override(self) -> str:
        return self.values(1)

    def swept(self) -> str:
        return self.values(self._random.choice((1, 2, 3, 300)))

    def values(self, count: int) -> str:
        key = self.one(list(VALUES), ["model", "data", "nothing", "a.b.c", "name", "", "checkpoint.x"])
        good = VALUES.get(key, "1 2").split()
        given = [self.one(good, BAD_NUMBERS, BAD_WORDS) for _ in range(count)]
        return f"{key}={','.join(given if count < 4 else map(str, range(1, count)))}"

    def some(self, **options: Callable[[], str]) -> list[str]:
        """Each option now and then, and seldom twice."""
        given: list[str] = []
        for name, make in options.items():
            option = "--" + name.replace("_", "-")
            for share in (0.4, self._badness / 8):
                if self.often(share):
                    given += [option, make()] if self.often(0.8) else [f"{option}={make()}"]
        return given


def _weigh(draw: Choices) -> list[str]:
    given = [
        draw.config(),
        "--on",
        draw.fleet(),
        *draw.some(set=draw.override),
        *draw.some(set=draw.override),
    ]
    given += draw.some(layout=draw.layout, html=draw.word, trace=draw.word)
    return given + [flag for flag in ("--check", "--simulate", "--explain") if draw.often(0.3)]


def _train(draw: Choices) -> list[str]:
    given = [draw.config()] if draw.often(0.9) else []
    options = {"on": draw.fleet, "layout": draw.layout, "steps": draw.number, "folder": draw.word}
    if draw.often(0.2):
        options |= {"restarts": draw.number, "processes": draw.number}
    given += draw.some(**options, set=draw.override)
    return given + (["--resume"] if draw.often(0.2) else [])


def _sweep(draw: Choices) -> list[str]:
    keys = [word for _ in range(3) for word in draw.some(set=draw.swept)]
    more = draw.some(on=draw.fleet, layout=draw.layout, steps=draw.number, folder=draw.word)
    return [draw.config(), *keys, *more]


def _sample(draw: Choices) -> list[str]:
    number = draw.number
    options = draw.some(prompt=draw.word, tokens=number, temperature=number, seed=number, step=number)
    return [*_run(draw), *options, *draw.some(tokenizer=draw.word)]


def _run(draw: Choices) -> list[str]:
    return [draw.one(RUNS, BAD_FILES, BAD_WORDS)]


def _tokenize(draw: Choices) -> list[str]:
    given = [
        draw.one(TEXTS, BAD_FILES, BAD_WORDS),
        "--to",
        draw.word(),
        "--workers",
        draw.one(["1"], BAD_NUMBERS),
    ]
    given += draw.some(dtype=lambda: draw.one(["int32", "uint16"], BAD_WORDS), text_key=draw.word)
    return given + draw.some(tokenizer=draw.word, end_of_document=lambda: draw.one(["256"], BAD_NUMBERS))


VERBS: dict[str, Callable[[Choices], list[str]]] = {
    "weigh": _weigh,
    "train": _train,
    "sweep": _sweep,
    "sample": _sample,
    "export": lambda draw: [
        draw.one(RUNS, BAD_FILES, BAD_WORDS),
        "--to",
        draw.word(),
        *draw.some(step=draw.number),
    ],
    "probe": lambda draw: [],
    "presets": lambda draw: [draw.one(PRESETS, BAD_FILES, BAD_WORDS)] if draw.often(0.8) else [],
    "fleets": lambda draw: (
        [draw.one(["H100", "v5p", "cpu"], BAD_WORDS, BAD_NUMBERS)] if draw.often(0.8) else []
    ),
    "formats": lambda draw: [],
    "doctor": lambda draw: [],
    "data tokenize": _tokenize,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of things that are hard to read."""
    deep = "[" * 5000
    (tmp_path / "deep.toml").write_text(f"steps = {deep}")
    (tmp_path / "wide.toml").write_text("preset = 'linear'\nmodel = " + "{a = " * 120 + "1" + "}" * 120)
    (tmp_path / "long.toml").write_text(f"preset = 'linear'\nsteps = {DIGITS}")
    (tmp_path / "hex.toml").write_text("preset = 'linear'\nsteps = 0x" + "f" * 6000)
    (tmp_path / "nul.toml").write_text("preset = 'bytes-nano'\ndata.path = '\\u0000'".replace("'", '"'))
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "ok.toml").write_text('preset = "linear"')
    (tmp_path / "\x1b.toml").write_text("preset = 3")
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "deep.jsonl").write_text(deep)
    (tmp_path / "long.jsonl").write_text(DIGITS)
    for name, config in (("junk", "{}"), ("run", ""), ("damaged", deep)):
        (tmp_path / name / "checkpoints" / "1").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config)
    from meshwright.config import load_config

    (tmp_path / "run" / "config.json").write_text(load_config("bytes-nano").model_dump_json())
    (tmp_path / "module.py").write_text(
        "import sys\n"
        "def fails(*_): raise ValueError\n"
        "def quits(*_): sys.exit('now')\n"
        "def cruncher(*_):\n    import torch\n    return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
        "def red(*_): raise ValueError('\\x1b[31m\\x07')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compile, no measurement, no process: an error of the documented kind in place of each."""
    # These load jax and torch, which takes seconds: no case is to be charged with that, or cut off in it.
    import meshwright.api._train  # noqa: F401
    from meshwright import measure
    from meshwright.contrib.clusters import _launch as _processes
    from meshwright.contrib.clusters import _launch as _restarts
    from meshwright.contrib.doctor import _doctor_commands as _doctor
    from meshwright.contrib.trained import sample_run  # noqa: F401
    from meshwright.programs import _weighed

    with suppress(ImportError):
        import torch  # noqa: F401

    def stop(*_: Any, **__: Any) -> Any:
        raise CompileError("stopped before it starts", hint="this is a test")

    monkeypatch.setattr(_weighed, "compile_program", stop)
    monkeypatch.setattr(measure, "probe", stop)
    monkeypatch.setattr(_doctor, "_run", lambda *_: (-1, "", "\x1b[31mno words"))
    monkeypatch.setattr(_processes, "_start", stop)
    monkeypatch.setattr(_restarts, "_run", stop)


@contextmanager
def limited() -> Iterator[None]:
    """Ends what takes too much of the processor, wherever it is."""

    def end(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fault_of(arguments: list[str], status: object, output: str, talk: str) -> str:
    """What is wrong with how a case ended; nothing where all is well."""
    if "Traceback" in talk or "Traceback" in output:
        return "a traceback: " + talk[-1500:]
    if status not in STATUSES:
        return f"status {status}"
    if found := CONTROL.search(output + talk):
        return f"a control character: {found[0]!r}"
    if status and not (output + talk).strip():
        return f"status {status} without words"
    if status == 2 and not any(words in talk for words in ("hint:", "Usage", "requires an argument")):
        return f"no hint: {talk[-300:]}"
    if status == 0 and "--json" in arguments and "--help" not in arguments:
        try:
            json.loads(output)
        except ValueError:
            return "the answer is no JSON: " + output[:300]
    return ""


@pytest.mark.parametrize(
    "cases", [pytest.param(100, marks=pytest.mark.wide), pytest.param(1000, marks=pytest.mark.long)]
)
def test_bad_command_lines_end_with_words(cases, folder, nothing_starts, capsys, monkeypatch):
    faults: list[str] = []
    verbs = dict.fromkeys(VERBS, 0)
    for number in range(cases):
        draw = Choices(number)
        environment, arguments = draw.environment, draw.arguments
        verbs[draw.verb] += 1
        with monkeypatch.context() as patch, limited():
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["meshwright", *arguments])
            try:
                main()
                status: object = "none"
            except SystemExit as ended:
                status = ended.code
            except Hang:
                status = f"more than {CPU_SECONDS} s of processor time"
        captured = capsys.readouterr()
        if fault := fault_of(arguments, status, captured.out, captured.err):
            line = shlex.join(word if len(word) < 100 else f"{word[:20]}..{len(word)}" for word in arguments)
            faults.append(f"case {number} {environment}: meshwright {line!a}\n  {fault}")
    assert not faults, f"{len(faults)} of {cases}:\n" + "\n".join(faults[:20])
    assert min(verbs.values()) >= cases // 100, verbs
