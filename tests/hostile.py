"""Make files as a stranger might leave them, each from the number of its case, and read them as a user would.

A case takes a good file, and changes values in it, its text, or what lies at its path. `outcome_of` reads it
through public names: a case ends well if it is read, or refused in words.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError, MeshwrightError

CPU_SECONDS = 20.0  # of one case
WALL_SECONDS = 120.0  # of one case, which waits for nothing but a template's process
MEMORY_BYTES = 3 * 2**30  # beyond what the process has
SECRET = "secret-of-another-folder"

NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, 10**299, 10**400, 1e308, -1e308, 1e-320, float("nan"), float("inf"))
TEXTS = (
    "",
    "x",
    "(",
    "\0",
    "\x1b[31m",
    "\udcff",
    "\ud800",
    "../x",
    "/dev/zero",
    "*" * 3000,
    "nope",
    "9" * 5000,
)
TEXTS += ("nccl" * 5000, "flash" * 9000, "a" * 100_000, "[" * 500, "{{ x", "\u202e", "a.b." * 5000)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [1], [[]], {"a": None}, [None], ["x", 1])


class Hang(BaseException):
    """A case has used its processor time, or waits."""


class Draw(random.Random):
    """The choices of one case."""

    def often(self, share: float) -> bool:
        return self.random() < share

    def value(self) -> Any:
        """Any value, mostly of a kind that is not expected."""
        return copy.deepcopy(self.choice(self.choice((NUMBERS, TEXTS, OTHERS))))

    def changed(self, tree: Any) -> Any:
        """A tree of JSON with some of its values, names or places changed."""
        tree = json.loads(json.dumps(tree))
        for _ in range(self.choice((1, 1, 2, 4))):
            owner, key = self.choice(list(_places(tree)) or [(None, None)])
            if owner is None:
                return self.value()
            change = self.randrange(5)
            if change == 0 and isinstance(owner, dict):
                del owner[key]
            elif change == 1:
                owner[key] = [owner[key]]
            elif change == 2 and isinstance(owner, dict):
                owner[self.choice(TEXTS)] = copy.deepcopy(owner[key])
            else:
                owner[key] = self.value()
        return tree

    def text_of(self, tree: Any) -> bytes:
        """A JSON text of a tree, now and then with names twice, too deep, too many digits, or not JSON."""
        text = json.dumps(tree).encode()
        change = self.randrange(20)
        if change == 0:
            deep = self.choice((99, 200, 900, 50_000))
            text = text[:1] + b'"deep":' * text.startswith(b"{") + b"[" * deep + b"]" * deep + b"," + text[1:]
        elif change == 1 and text.startswith(b"{"):
            text = b"{" + text[1:-1] + b"," + text[1:]
        elif change == 2:
            text = text.replace(b"1", b"9" * self.choice((30, 400, 5000)), 1)
        elif change < 6:
            text = self.damaged(text)
        return text

    def damaged(self, content: bytes) -> bytes:
        """Bytes that are cut, turned or added to."""
        change, place = self.randrange(4), self.randrange(len(content) + 1)
        if change == 0:
            return content[:place]
        if change == 1:
            return content[:place] + self.randbytes(self.choice((1, 8))) + content[place:]
        if change == 2:
            return content[:place] + self.randbytes(8) + content[place + 8 :]
        return content + self.choice((b"\0", b"[", b"\xff\xfe", b"{" * 300))

    def put(self, path: Path, content: bytes) -> None:
        """Write a file, or now and then put something else in its place."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        change = self.randrange(40)
        if change == 0:
            os.mkfifo(path)
        elif change == 1:
            path.symlink_to(self.choice(("/dev/zero", "/dev/null", path.name, "nowhere")))
        elif change == 2:
            path.mkdir()
        elif change == 3:
            path.touch()
        else:
            path.write_bytes(content)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the owner and the key or index of each value below `tree`."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 256},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": None,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 512, "sliding_window": 64, "sliding_window_pattern": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "n_routed_experts": 8,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 512, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip


STEPS = {
    "config": "linear",
    "on": "8xH100",
    "measured": "12ms",
    "set": ["batch.sequences=64"],
    "layout": "fsdp=8",
}
PRICES = {"provider": "x", "source": "y", "prices": [{"chip": "H100", "usd_per_device_hour": 2.5}]}


def config(draw: Draw, folder: Path) -> Any:
    """A model's config.json, a run's, or a TOML file: of a run, of measured steps, of prices."""
    from meshwright.config import load_config, overridden
    from meshwright.contrib.calibration import measured_steps_in
    from meshwright.contrib.prices import list_prices

    kind = draw.choice(("model", "model", "run", "toml", "override", "steps", "prices"))
    if kind in ("steps", "prices"):
        table = draw.choice(list(_places([draw.changed(STEPS if kind == "steps" else PRICES)])))[0]
        text = "\n".join(_toml(draw, each) for each in (table if isinstance(table, list) else [table]))
        text = ("[[run]]\n" if kind == "steps" else "[x]\n") + text
        draw.put(folder / "a.toml", text.encode("utf-8", "surrogatepass"))
        if kind == "steps":
            return measured_steps_in(folder / "a.toml")
        return list_prices("H100", refreshed=folder / "a.toml")
    if kind == "model":
        draw.put(folder / "config.json", draw.text_of(draw.changed(draw.choice((LLAMA, GEMMA, DEEPSEEK)))))
        return load_config(str(folder)).model.num_parameters
    run = load_config(draw.choice(("bytes-nano", "linear", "lenet")))
    tree = run.model_dump(mode="json")
    if kind == "run":
        draw.put(folder / "config.json", draw.text_of(draw.changed(tree)))
        return load_config(str(folder)).model.num_parameters
    if kind == "override":
        section = draw.choice([key for key in tree if isinstance(tree[key], dict)])
        key = draw.choice(list(tree[section]) or ["x"])
        return overridden(run, [f"{section}.{key}={draw.value()}"]).name
    lines = [
        'preset = "linear"',
        *(f"[{name}]\n{_toml(draw, value)}" for name, value in tree.items() if value),
    ]
    text = "\n".join(draw.sample(lines, len(lines))).encode("utf-8", "surrogatepass")
    draw.put(folder / "run.toml", draw.damaged(text) if draw.often(0.3) else text)
    return load_config(str(folder / "run.toml")).model.num_parameters


def _toml(draw: Draw, table: Any) -> str:
    fields = draw.changed(table if isinstance(table, dict) else {"x": table})
    pairs = fields.items() if isinstance(fields, dict) else ()
    return "\n".join(f"{draw.choice((key, repr(key)))} = {json.dumps(value)}" for key, value in pairs)


KERNELS = [
    {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": 10.0 * n,
        "dur": 8.5,
        "pid": 0,
        "args": {"device": n % 2},
    }
    for n, name in enumerate(
        (
            "ampere_bf16_s16816gemm_128x128",
            "ncclDevKernel_AllReduce_Sum_bf16",
            "flash_fwd_kernel",
            "Memcpy DtoD",
        )
    )
]
KINETO = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 40},
        *KERNELS,
    ],
}


def trace(draw: Draw, folder: Path) -> Any:
    """A trace of torch.profiler, plain or packed, or an XPlane file."""
    from meshwright.contrib.calibration import is_xplane, kineto_step, traced_step, xplane_events

    kind = draw.choice(("json", "json", "json", "gz", "xplane"))
    content = draw.text_of(draw.changed(KINETO))
    if kind == "gz":
        content = gzip.compress(b" " * draw.choice((0, 0, 0, 2**27)) + content)
        content = draw.damaged(content) if draw.often(0.3) else content
    elif kind == "xplane":
        source = Path(__file__).parent / "contrib/calibration" / "h200_bytes_nano.xplane.pb.gz"
        content = draw.damaged(draw.damaged(gzip.decompress(source.read_bytes())[:200_000]))
    path = folder / {"json": "t.json", "gz": "t.json.gz", "xplane": "t.xplane.pb"}[kind]
    draw.put(path, content)
    step = traced_step(xplane_events(path), {}, (), ()) if is_xplane(path) else kineto_step(path)
    assert 0 < step.seconds <= 1e7, f"a step of {step.seconds} s"
    return step.seconds


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}


def safetensors(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def weights(draw: Draw, folder: Path) -> Any:
    """The safetensors files of a model, perhaps with an index."""
    from meshwright.config import load_config
    from meshwright.contrib.huggingface import FirstWeights, WeightFiles

    outside = json.dumps({SECRET: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder.parent / "secret.safetensors").write_bytes(safetensors(outside, bytes(8)))
    model = folder / "model"
    model.mkdir()
    header = HEADER
    if draw.often(0.7):
        header = draw.changed(HEADER)
    elif draw.often(0.5):
        entry = draw.choice(
            [entry for name, entry in json.loads(json.dumps(HEADER)).items() if name != "__metadata__"]
        )
        header = {
            **HEADER,
            draw.choice("abcd"): {**entry, "data_offsets": [draw.randint(-9, 50), draw.randint(-9, 50)]},
        }
    content = safetensors(draw.text_of(header), bytes(range(40)))
    draw.put(model / "model.safetensors", draw.damaged(content) if draw.often(0.2) else content)
    if draw.often(0.5):
        file = draw.choice(
            ("model.safetensors", "../secret.safetensors", "../../secret.safetensors", "x/../../a", 5)
        )
        index = {"metadata": {}, "weight_map": {"a": "model.safetensors", draw.choice(("b", SECRET)): file}}
        index = draw.changed(index) if draw.often(0.5) else index
        draw.put(model / "model.safetensors.index.json", draw.text_of(index))
    if draw.often(0.2):
        draw.put(model / "config.json", draw.text_of(draw.changed(LLAMA)))
        return FirstWeights(model, load_config("llama3-8b")).base
    files = WeightFiles(model)
    assert SECRET not in files.names, "a file outside the folder was read"
    return sum(float(np.asarray(files.read(name), np.float64).sum()) for name in files.names)


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFC"},
    "added_tokens": [{"id": 0, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<end>": 0, "[UNK]": 1, "a": 2, "b": 3}, "unk_token": "[UNK]"},
}  # fmt: skip
SETTINGS = {"eos_token": {"content": "<end>"}, "bos_token": None, "add_bos_token": True, "chat_template": ""}
ATOMS = (
    "messages", "messages[0].content", "eos_token", "'a'", "5", "0", "-1", "10**11", "9**9", "[]", "{}",
    "none", "messages[0]['role']", "'%999999999d' % 5", "'\\ud800'", "x.y.z", "range(99999)", "range(10**9)",
    "1.5", "cycler", "namespace(a=1)", "lipsum", "''.__class__", "messages.__init__", "joiner", "dict(a=5)",
)  # fmt: skip
OPERATORS = ("+", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and")
FILTERS = (
    "abs", "batch(2)", "center(10**10)", "dictsort", "first", "float", "format(5)", "indent(9)", "int",
    "items", "join('x')", "last", "length", "list", "max", "random", "replace('a','b')", "reverse", "round",
    "slice(0)", "sort", "sum", "tojson", "tojson(indent=10**9)", "trim", "truncate(-1)", "unique", "upper",
    "urlize",    "wordwrap(0)", "xmlattr", "map('upper')", "groupby('role')", "attr('__class__')", "string",
)  # fmt: skip


WORDS = ("break", "continue", "nothing", "include messages", "import x as y", "block b")


def template_of(draw: Draw, depth: int = 0) -> str:
    """A program of Jinja, of which each part may be wrong."""
    body = template_of(draw, depth + 1) if depth < 3 and draw.often(0.8) else "x"
    value, other = _expression(draw), _expression(draw)
    forms = (
        f"{{{{ {value} }}}}{body}",
        f"{{% for m in {value} %}}{{{{ m.content }}}}{body}{{% endfor %}}",
        f"{{% if {value} %}}{body}{{% else %}}{other}{{% endif %}}",
        f"{{% set y = {value} %}}{body}{{{{ y }}}}",
        f"{{% macro f(x) %}}{body}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({value}) }}}}",
        f"{{% macro f(x) %}}{body}{{% endmacro %}}{{{{ f({value}) }}}}",
        f"{{{{ raise_exception({value}) }}}}{body}",
        f"{{{{ strftime_now({value}) }}}}{body}",
        f"{{% {draw.choice(WORDS)} %}}{body}",
        f"{{% for i in range({draw.choice((3, 999, 99999))}) %}}{body}{{% endfor %}}",
    )
    good = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    return draw.choice((good, good + body, draw.choice(forms), draw.choice(forms)))


def _expression(draw: Draw) -> str:
    value = draw.choice(ATOMS)
    for _ in range(draw.randrange(3)):
        value = draw.choice(
            (f"({value} {draw.choice(OPERATORS)} {draw.choice(ATOMS)})", f"({value}|{draw.choice(FILTERS)})")
        )
    return value


def template(draw: Draw, folder: Path) -> Any:
    """A model's tokenizer with its settings and its chat template."""
    from meshwright.config import load_config
    from meshwright.trainer.data import open_data

    settings: Any = {**SETTINGS, "chat_template": template_of(draw)}
    tokenizer: Any = TOKENIZER
    change = draw.randrange(4)
    if change == 0:
        tokenizer = draw.changed(TOKENIZER)
    elif change == 1:
        settings = draw.changed(settings)
    draw.put(
        folder / "tokenizer.json", draw.text_of(tokenizer) if change == 0 else json.dumps(tokenizer).encode()
    )
    draw.put(
        folder / "tokenizer_config.json",
        draw.text_of(settings) if change == 1 else json.dumps(settings).encode(),
    )
    if draw.often(0.1):
        draw.put(folder / "chat_template.jinja", draw.damaged(template_of(draw).encode()))
    line = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]}
    lines = [json.dumps(line).encode()] * 3
    if draw.often(0.2):
        lines[1] = draw.text_of(draw.changed(line))
    draw.put(folder / "chat.jsonl", b"\n".join(lines))
    changes = {"source": "instructions", "path": str(folder / "chat.jsonl"), "tokenizer": str(folder)}
    changes |= {"held_out_fraction": 0.4}
    run = load_config("bytes-nano", {f"data.{key}": value for key, value in changes.items()})
    return open_data(run).batch(0, "train")["tokens"].shape


FACTS = {
    "schema": 1, "tokenizer": "bytes", "tokenizer_sha256": None, "dtype": "uint16", "vocab_size": 257,
    "end_of_document": 256, "num_tokens": 400, "num_documents": 2,
    "inputs": [{"path": "a", "num_bytes": 5, "sha256": "x", "num_documents": 2, "num_tokens": 400}],
}  # fmt: skip


def _megatron(tokens: np.ndarray) -> bytes:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 2, 3)
    sizes, begins = np.array([150, len(tokens) - 150], "<i4"), np.array([0, 300], "<i8")
    return head + sizes.tobytes() + begins.tobytes() + np.arange(3, dtype="<i8").tobytes()


def data(draw: Draw, folder: Path) -> Any:
    """Token files of each format with what lies beside them, a mixture, texts, or images."""
    from meshwright.config import load_config
    from meshwright.contrib.texts import tokenize
    from meshwright.trainer.data import open_data

    tokens = np.arange(400, dtype="<u2") % 256
    name, form = draw.choice(
        (("a.bin", "raw"), ("a.bin", "raw"), ("a.idx", "megatron"), ("a.bin", "llm.c"), ("a.ds", "datatrove"),
         ("mix.toml", "mixture"), ("a.jsonl", "text"), ("a.txt", "text"), ("a.parquet", "text"), ("", "idx"))
    )  # fmt: skip
    path = folder / name
    if form == "text":
        _write_text(draw, path)
        return tokenize(
            [str(path)], str(folder / "made.bin"), text_key=draw.choice(("text", "text", "x"))
        ).num_tokens
    if form == "idx":
        return _images(draw, folder)
    content = tokens.tobytes()
    if form == "raw" and draw.often(0.9):
        draw.put(folder / "a.bin.json", draw.text_of(draw.changed(FACTS)))
    elif form == "megatron":
        draw.put(folder / "a.bin", content)
        content = _megatron(tokens)
    elif form == "llm.c":
        content = np.array([20240520, 1, len(tokens)] + [0] * 253, "<i4").tobytes() + content
    elif form == "datatrove":
        draw.put(folder / "a.ds.index", draw.damaged(np.array([150, 400], "<u8").tobytes()))
        draw.put(
            folder / "a.ds.metadata", draw.choice((b"gpt2|2\n5", b"gpt2|" + b"9" * 5000, b"\xff", b"a|b|c"))
        )
    elif form == "mixture":
        (folder / "web.bin").write_bytes(content)
        source = {"path": "web.bin", "dtype": "uint16", "weight": 0.5}
        content = ("[[source]]\n" + _toml(draw, source)).encode("utf-8", "surrogatepass")
        content += (
            b'\n[[source]]\npath = "a.bin"\ndtype = "uint16"\nweight = ' + str(draw.choice(NUMBERS)).encode()
        )
    if form not in ("raw", "mixture") or draw.often(0.2):
        content = draw.damaged(content)
    draw.put(path, content)
    where = draw.choice(
        (str(path), str(path), str(folder), f"{folder}/{draw.choice(('a*', '*', '[a', '**', '*' * 300))}")
    )
    where = draw.choice(TEXTS) if draw.often(0.05) else where
    changes: dict[str, Any] = {
        "data.source": "mixture" if form == "mixture" else "tokens",
        "data.path": where,
    }
    if form != "mixture":
        changes |= {"data.format": form} | ({"data.dtype": "uint16"} if form in ("raw", "datatrove") else {})
    return open_data(load_config("bytes-nano", changes)).batch(0, "train")["tokens"].shape


def _write_text(draw: Draw, path: Path) -> None:
    line = {"text": "some words", "id": 5, "meta": {"a": [1]}}
    lines = [
        draw.text_of(draw.changed(line)) if draw.often(0.3) else json.dumps(line).encode() for _ in range(4)
    ]
    content = b"\n".join(lines) if path.suffix == ".jsonl" else "wörds and words ".encode() * 50
    if path.suffix == ".parquet":
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]

        names = [draw.choice(("text", "x", "")) for _ in range(3)]
        columns = [draw.choice((["a", "b"], [1, 2], [None, "b"], [["a"], []])) for _ in names]
        table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names=names)
        pyarrow.parquet.write_table(table, path)
        content = path.read_bytes()
    draw.put(path, draw.damaged(content) if draw.often(0.4) else content)


def _images(draw: Draw, folder: Path) -> Any:
    from meshwright.config import load_config
    from meshwright.contrib.images import write_images
    from meshwright.trainer.data import open_data

    images, labels = np.zeros((4, 28, 28), np.uint8), np.arange(4, dtype=np.uint8)
    write_images(folder, train=(images, labels), held_out=(images, labels))
    chosen = draw.choice(sorted(folder.iterdir()))
    content = gzip.decompress(chosen.read_bytes())
    packed = gzip.compress(draw.damaged(content) + b"\0" * draw.choice((0, 0, 0, 2**27)))
    draw.put(chosen, draw.damaged(packed) if draw.often(0.3) else packed)
    changes = {"data.source": "idx", "data.folder": str(folder), "batch.sequences": 2}
    return open_data(load_config("lenet", changes)).batch(0, "train")["images"].shape


RUN = {
    "what": "step time", "program": "p", "fleet": "8xH100", "fingerprint": "f", "rates": "r",
    "date": "2026-01-01",
    "measured_seconds": 1.0, "predicted_seconds": 2.0, "exposed_seconds": {"matmul": 2.0},
    "classes": {"matmul": {"measured_seconds": 1.0, "predicted_seconds": 2.0}},
    "recomputed_seconds": {"matmul": 0.5},
}  # fmt: skip
RATES = {
    "matmul_flops_per_second": {"bf16": 6e14}, "memory_bytes_per_second": 3e12, "launch_seconds": 1e-6,
    "date": "2026-01-01", "source": "probe", "chip": "H100", "launch_seconds_among": {"2": 2e-6},
    "collectives": [
        {"kind": "all-reduce", "group_size": 2, "bytes_per_second": 1e9, "latency_seconds": 1e-6},
    ],
}  # fmt: skip
PAST = {
    "date": "2026-01-01", "run": "r", "steps": 5, "config": "c", "fleet": "f", "quantity": "step seconds",
    "unit": "seconds", "predicted": 1.0, "measured": 2.0, "inside": True,
}  # fmt: skip


def cache(draw: Draw, folder: Path) -> Any:
    """A file of the cache: rates, measured steps, or the history of errors."""
    from meshwright.api import history_path
    from meshwright.contrib.causes import history
    from meshwright.hardware import Fleet
    from meshwright.measure import calibration_for, measured_runs_for, measured_runs_path

    fleet = Fleet.parse("8xH100")
    file = measured_runs_path(fleet)
    file.parent.mkdir(parents=True, exist_ok=True)
    kind = draw.choice(("runs", "rates", "history"))
    try:
        if kind == "runs":
            draw.put(file, draw.text_of(draw.changed({"schema": 1, "chip": "H100", "runs": [RUN]})))
            return measured_runs_for(fleet)
        if kind == "rates":
            file = file.with_name(file.name.replace("factors-", "calibration-"))
            draw.put(file, draw.text_of(draw.changed(RATES)))
            return calibration_for(fleet)
        file = history_path()
        draw.put(file, b"\n".join(draw.text_of(draw.changed(PAST)) for _ in range(3)))
        return [row.relative_error for row in history().rows]
    finally:
        draw.put = Draw.put.__get__(draw)  # the file is nobody else's
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        file.unlink(missing_ok=True)


MEASUREMENT = {
    "schema": 2, "steps": 4, "signal": "", "resumed_from": None, "tokens_per_step": 64,
    "compile_seconds": 1.0, "step_seconds": {"median": 0.1, "low": 0.09, "high": 0.2, "num_steps": 2},
    "losses": {"1": 2.0, "2": 1.5},
    "held_out_losses": {"2": 1.6}, "held_out_metrics": {"2": {"accuracy": 0.5}}, "num_bad_steps": 0,
    "seconds_by_phase": {"step": 0.4, "compile": 1.0}, "unigram_entropy_nats": 3.0, "not_measured": {},
    "argument_bytes_per_device": 1000, "peak_bytes": None, "process_rss_growth_bytes": 5000,
    "xla_flops": 10**6,
    "fingerprint": "f", "platform": "cpu", "device_kind": "cpu", "num_devices": 1, "host": "h",
    "versions": {"jax": "0"}, "date": "2026-01-01", "sample_prompt": "", "sample": "",
}  # fmt: skip
RECONCILIATION = {
    "schema": 1, "same_program": True, "not_compared": {"MFU": "why"},
    "rows": [{"quantity": "step seconds", "unit": "seconds", "predicted": 1.0, "measured": 2.0,
              "how": "clock", "low": 0.5, "high": 3.0, "relative_error": -0.5, "inside": True}],
}  # fmt: skip


def run(draw: Draw, folder: Path) -> Any:
    """What lies in a run's folder, as its page and its resumption read it."""
    from meshwright.config import load_config
    from meshwright.contrib.huggingface import base_of
    from meshwright.contrib.pages import read_run, run_page
    from meshwright.trainer.loop import last_recorded_step, metrics_of

    lines = [{"step": step, "loss": 2.0 / step, "seconds": 0.1} for step in (1, 2, 3)]
    trees: dict[str, Any] = {
        "config.json": load_config("linear").model_dump(mode="json"), "measurement.json": MEASUREMENT,
        "reconciliation.json": RECONCILIATION, "base.json": {"folder": "x", "model_type": "llama"},
    }  # fmt: skip
    changed = draw.choice((*trees, "metrics.jsonl", "notices.jsonl"))
    for name, tree in trees.items():
        (folder / name).write_text(json.dumps(tree))
        if name == changed:
            draw.put(folder / name, draw.text_of(draw.changed(tree)))
    draw.put(folder / "metrics.jsonl", b"\n".join(draw.text_of(draw.changed(line)) for line in lines))
    last_recorded_step(folder), metrics_of(folder)
    _ = run_page(folder) if draw.often(0.2) else read_run(folder)  # a page's curves take a while to draw
    return base_of(folder)


KINDS: dict[str, Callable[[Draw, Path], Any]] = {
    "run": run, "config": config, "trace": trace, "weights": weights, "template": template,
    "data": data, "cache": cache,
}  # fmt: skip


@contextmanager
def limited() -> Iterator[None]:
    """End what takes too much of the processor or of the memory, wherever it is."""

    def end(*_: object) -> None:
        raise Hang

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, CPU_SECONDS),
        signal.SIGALRM: (signal.ITIMER_REAL, WALL_SECONDS),
    }
    before = {number: signal.signal(number, end) for number in timers}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, limits[1]))
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
        resource.setrlimit(resource.RLIMIT_AS, limits)


def outcome_of(kind: str, number: int, folder: Path) -> tuple[str, str]:
    """Return how a case ended, "read", "words" or a fault, and its words."""
    shutil.rmtree(folder, ignore_errors=True)
    inner = folder / "case"
    inner.mkdir(parents=True)
    try:
        with limited():
            KINDS[kind](Draw(f"{kind} {number}"), inner)
        return "read", ""
    except MeshwrightError as error:
        if not isinstance(error, InputError) or not error.hint or len(error.message) > 12_000:
            return "fault", f"{type(error).__name__} of {len(error.message)} characters: {error}"[:500]
        return "words", error.message
    except Hang:
        return "fault", f"more than {CPU_SECONDS} s of processor time, or {WALL_SECONDS} s in all"
    except BaseException as wrong:
        if isinstance(wrong, KeyboardInterrupt | SystemExit):
            raise
        import traceback

        return "fault", "".join(line[-300:] for line in traceback.format_exception(wrong)[-4:])
    finally:
        for path in folder.rglob("*"):
            if path.is_fifo():
                path.unlink()
