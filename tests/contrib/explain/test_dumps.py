"""Dumps and profiles that JAX itself writes here, and hostile ones."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.profiler
import pytest
from jax.experimental.compilation_cache import compilation_cache

import meshwright as mw
from meshwright.errors import InputError
from tests.commands import Done

MIB = 2**20


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of a train step and of a small function."""
    folder = tmp_path_factory.mktemp("dump")

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        gradients = jax.grad(loss)(params, x)
        return {name: value - 0.1 * gradients[name] for name, value in params.items()}

    params = {"up": jax.ShapeDtypeStruct((64, 1024), "float32")}
    params["down"] = jax.ShapeDtypeStruct((1024, 64), "float32")
    x = jax.ShapeDtypeStruct((1024, 64), "float32")
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    jax.config.update("jax_enable_compilation_cache", False)  # of a program from a cache JAX dumps no buffers
    compilation_cache.reset_cache()
    jax.jit(step).lower(params, x).compile(compiler_options=options)
    jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=options)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    return folder


def test_dump_names_the_largest_program_and_its_buffers(dump: Path) -> None:
    made = mw.explain_file(dump)
    assert made.line.startswith("jit_step needs ")
    assert made.needed_bytes == sum(made.parts.values())
    assert made.parts["params"] == 2 * 64 * 1024 * 4
    top = made.held[0]
    assert "f32[1024,1024]" in top.what  # the hidden layer, 4 MiB
    assert top.place.startswith("test_dumps.py:")
    assert made.missing_bytes is None
    assert any("2 programs" in note for note in made.notes)


def test_saving_by_donation_is_what_the_results_take(dump: Path) -> None:
    saved = {each.change: each.saved_bytes for each in mw.explain_file(dump).settings}
    assert saved["jax.jit(step, donate_argnums=...)"] == 2 * 64 * 1024 * 4


def test_one_file_of_a_dump_names_its_program(dump: Path) -> None:
    files = sorted(dump.glob("*lambda*buffer-assignment.txt"))
    assert files
    made = mw.explain_file(files[0])
    assert made.needed_bytes == 2 * 1024 * 64 * 4
    assert "lambda" in made.line


def test_dump_is_compared_with_a_device(dump: Path) -> None:
    made = mw.explain_file(dump, on="1xH100")
    assert made.usable_bytes is not None
    assert made.needed_bytes is not None
    assert made.missing_bytes == made.needed_bytes - made.usable_bytes
    assert made.what_must_go.endswith("would be left")


def test_damaged_dumps_are_refused_in_words(dump: Path, tmp_path: Path) -> None:
    names = [path.name for path in dump.iterdir() if "jit_step" in path.name and path.suffix == ".txt"]
    kinds = ("after_optimizations.txt", "-buffer-assignment.txt", "-live-range.txt")
    texts = {name: (dump / name).read_text() for name in names if name.endswith(kinds)}
    assert len(texts) == 3
    for damaged in texts:
        whole = texts[damaged]
        for text in ("", whole[: len(whole) // 2], whole.replace("size", "sighs"), "\x00" * 100):
            for name, each in texts.items():
                (tmp_path / name).write_text(text if name == damaged else each)
            with contextlib.suppress(InputError):  # any other error fails the test
                assert mw.explain_file(tmp_path).needed_bytes is not None


def test_program_from_jaxs_cache_has_no_buffers_in_its_dump(tmp_path: Path) -> None:
    (tmp_path / "module_0001.jit_step.after_optimizations.txt").write_text("HloModule jit_step")
    with pytest.raises(InputError, match="no buffer assignment") as refused:
        mw.explain_file(tmp_path)
    assert "JAX_ENABLE_COMPILATION_CACHE=false" in refused.value.hint


def test_folder_without_a_dump_and_links_out_of_it(dump: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no buffer assignment"):
        mw.explain_file(tmp_path)
    for path in dump.iterdir():
        if path.suffix == ".txt":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(InputError, match="no buffer assignment"):
        mw.explain_file(tmp_path)


def test_profile_of_jax_names_the_line_that_made_an_array(tmp_path: Path) -> None:
    array = jnp.ones((3 * MIB // 4,), "float32").block_until_ready()
    path = tmp_path / "memory.prof"
    path.write_bytes(jax.profiler.device_memory_profile())
    made = mw.explain_file(path)
    here = [
        each for each in made.held if each.module == "test_profile_of_jax_names_the_line_that_made_an_array"
    ]
    assert any(each.num_bytes == array.nbytes == 3 * MIB for each in here)
    assert all(each.place.startswith("test_dumps.py:") for each in here)
    assert made.needed_bytes == sum(each.num_bytes for each in made.held)
    compared = mw.explain_file(path, on="1xH100")
    assert compared.usable_bytes is not None


def _varint(number: int) -> bytes:
    made = b""
    while number > 0x7F:
        made += bytes([number & 0x7F | 0x80])
        number >>= 7
    return made + bytes([number])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _profile(*, packed: bool = True, size: int = 3 * MIB) -> bytes:
    """A profile with two arrays of one line of the user's, below a frame of a library."""
    texts = ["", "allocations", "count", "space", "bytes", "kind", "buffer", "device", "gpu:1",
             "dot", "/env/site-packages/jax/numpy.py", "make", "/me/train.py"]  # fmt: skip
    types = [_field(1, 1) + _field(2, 2), _field(1, 3) + _field(2, 4)]
    both = (1, 2), (2, size)
    lists = b"".join(_field(n, value) for n, values in zip((1, 2), both, strict=True) for value in values)
    if packed:
        lists = b"".join(_field(n, b"".join(map(_varint, v))) for n, v in zip((1, 2), both, strict=True))
    labels = _field(3, _field(1, 5) + _field(2, 6)) + _field(3, _field(1, 7) + _field(2, 8))
    locations = [_field(1, n) + _field(4, _field(1, n) + _field(2, 70 + n)) for n in (1, 2)]
    functions = [_field(1, n) + _field(2, 7 + 2 * n) + _field(4, 8 + 2 * n) for n in (1, 2)]
    parts = [(1, types), (2, [lists + labels]), (4, locations), (5, functions)]
    made = b"".join(_field(n, each) for n, values in parts for each in values)
    return made + b"".join(_field(6, text.encode()) for text in texts)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_profile_is_read_by_the_frame_of_the_users_source(tmp_path: Path, packed: bool, zipped: bool) -> None:
    path = tmp_path / "memory.prof"
    content = _profile(packed=packed)
    path.write_bytes(gzip.compress(content) if zipped else content)
    made = mw.explain_file(path)
    (held,) = made.held
    assert (held.num_bytes, held.what, held.place, held.module) == (
        3 * MIB,
        "2 arrays",
        "train.py:72",
        "make",
    )
    assert made.parts == {"arrays on gpu:1": 3 * MIB}


def test_hostile_profiles_are_refused_in_words(tmp_path: Path) -> None:
    whole = _profile()
    path = tmp_path / "memory.prof"
    shortened = [whole[:length] for length in range(8, len(whole) - 1, 5)]
    odd = [_profile(size=2**63), _field(1, b"\x00\x01") * 3, whole + b"\x0a" + b"\xff" * 12, whole + b"\x0f"]
    for content in (*shortened, *odd):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(InputError) as refused:
            mw.explain_file(path)
        assert str(path) in refused.value.message


def test_gzip_bombs_pipes_and_other_files_are_refused_in_words(
    tmp_path: Path, meshwright: Callable[..., Done]
) -> None:
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b"\0" * (80 * MIB), 9))
    pipe, link, torn = tmp_path / "pipe", tmp_path / "link", tmp_path / "torn.gz"
    os.mkfifo(pipe)
    link.symlink_to(link)
    torn.write_bytes(gzip.compress(b"RESOURCE_EXHAUSTED" * 1000)[:-20])
    wide, checkpoint = tmp_path / "wide.txt", tmp_path / "model.pt"
    wide.write_bytes("CUDA out of memory".encode("utf-16"))
    checkpoint.write_bytes(b"PK\x03\x04" + b"\0" * 50)
    words = {
        bomb: "when it is unpacked",
        pipe: "it is a pipe",
        link: "cannot be read",
        torn: "no whole gzip file",
        wide: "UTF-16",
        checkpoint: "torch.save",
        tmp_path / "absent.log": "No such file",
    }
    for path, said in words.items():
        done = meshwright("explain", str(path))
        assert done.status == 2
        assert said in done.talk
        assert "Traceback" not in done.talk
