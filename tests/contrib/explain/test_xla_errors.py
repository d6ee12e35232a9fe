from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import InputError
from tests.commands import Done

GIB, MIB = 2**30, 2**20
SAMPLES = Path(__file__).parent / "samples"
Log = Callable[[str | bytes], Path]

GPU = (SAMPLES / "gpu.txt").read_text()
TPU = (SAMPLES / "tpu.txt").read_text()


def test_gpu_message_names_the_largest_buffer_its_line_and_what_must_go(log: Log) -> None:
    made = mw.explain_file(log(GPU))
    assert made.needed_bytes == 13 * GIB
    assert made.line == (
        "train.py:40 (main): the program needs 13.0 GiB, and 9.00 GiB of it could not be had: "
        "8.00 GiB are 2 x f32[16,16,2048,2048] of attention.py:88"
    )
    top = made.held[0]
    assert (top.num_bytes, top.category, top.module) == (8 * GIB, "forward pass", "Model/block_3/attention")
    assert [each.category for each in made.held] == ["forward pass", "backward pass", "argument"]
    assert made.parts["temporaries"] == 9 * GIB


def test_savings_are_halves_and_differences_of_the_compilers_sizes(log: Log) -> None:
    saved = {each.change: each.saved_bytes for each in mw.explain_file(log(GPU)).settings}
    assert (
        saved["compute these in bf16"] == 4 * GIB
    )  # half of the two; the argument's format is not the step's
    assert saved["jax.checkpoint around attention.py:88"] == 8 * GIB
    # arguments 3, outputs 2, temporaries 9 and 264 bytes are 14 GiB and in all 13: one is in both.
    assert saved["jax.jit(step, donate_argnums=...)"] == GIB - 264
    assert saved["no setting: fragmentation"] == 512 * MIB
    assert None in saved.values()  # what only a weighing tells has no figure


def test_tpu_message_with_padding_and_undonated_outputs(log: Log) -> None:
    made = mw.explain_file(log(TPU))
    assert (made.needed_bytes, made.usable_bytes, made.missing_bytes) == (20.5 * GIB, 15.5 * GIB, 5 * GIB)
    assert made.line.startswith(
        "the program needs 20.5 GiB where 15.5 GiB are: 6.00 GiB are bf16[24,16,4096,1024]"
    )
    assert made.what_must_go == "5.00 GiB must go: the largest alone holds 6.00 GiB"
    saved = {each.change: each.saved_bytes for each in made.settings}
    assert saved["dimensions in multiples of 128 and 8"] == 2 * GIB - 16 * MIB
    assert saved["jax.jit(step, donate_argnums=...)"] == 3 * GIB
    assert made.parts["reserved by the runtime"] == 256 * MIB


@pytest.mark.parametrize(
    ("sentence", "needed", "usable"),
    [
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (33.50G) exceeds "
            "available HBM (15.50G).",
            33.5,
            15.5,
        ),
        (
            "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 30.50G, SparseCore Hbm usage 10.00G, exceeding "
            "available bytes: 31.00G",
            40.5,
            31,
        ),
        (
            "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 29.50G at the "
            "bottom of "
            "memory. That was not possible. There are 15.50G free, 0B reserved, and 15.50G reservable.",
            29.5,
            15.5,
        ),
        (
            "ValueError: Allocation (size=21474836480) would exceed memory (size=17179869184) :: "
            "#allocation9 "
            "[shape = 'f32[320,4096,4096]{1,2,0:T(8,128)}', space=hbm]",
            20,
            16,
        ),
    ],
)
def test_sentences_alone(log: Log, sentence: str, needed: float, usable: float) -> None:
    made = mw.explain_file(log(sentence))
    assert (made.needed_bytes, made.usable_bytes) == (needed * GIB, usable * GIB)
    assert made.missing_bytes == (needed - usable) * GIB


def test_on_chip_memory_is_not_taken_for_the_devices(log: Log) -> None:
    made = mw.explain_file(log("Ran out of memory in memory space vmem. Used 44.00M of 32.00M vmem."))
    assert "the chip's own vmem memory" in made.line


def test_pool_of_the_allocator_tells_how_much_is_missing(log: Log) -> None:
    text = """W bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to allocate 4.00GiB
I bfc_allocator.cc:1100] Stats:
Limit:                      10737418240
InUse:                       8589934592
RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.
"""
    made = mw.explain_file(log(text))
    assert made.missing_bytes == 2 * GIB
    assert any("MEM_FRACTION" in each.change for each in made.settings)


def test_error_in_the_middle_of_a_long_log_of_one_rank(log: Log) -> None:
    """The lines of other ranks are between those of the first, and a warning was long before."""
    lines = [f"[rank3]: {line}" for line in TPU.splitlines()]
    mixed = [part for line in lines for part in (line, "[rank1]:      Shape: f32[9,9]")]
    noise = b"step 17, loss 2.5, \xff\xfe\n" * 400_000
    warning = b"Allocator (GPU_0_bfc) ran out of memory trying to allocate 7.00GiB; this is not a failure\n"
    made = mw.explain_file(log(warning + noise + "\n".join(mixed).encode() + b"\n" + noise))
    assert made.needed_bytes == 20.5 * GIB
    assert [each.num_bytes for each in made.held] == [6 * GIB, 2 * GIB]
    assert made.held[0].place == "attention.py:88"


def test_message_that_is_printed_as_one_line(log: Log) -> None:
    made = mw.explain_file(log(json.dumps({"severity": "ERROR", "message": TPU})))
    assert [each.num_bytes for each in made.held] == [6 * GIB, 2 * GIB]


def test_list_that_is_cut_off_has_what_is_whole(log: Log) -> None:
    for length in range(0, len(GPU), 97):
        text = GPU[:length]
        try:
            made = mw.explain_file(log(text))
        except InputError:
            assert "while trying to allocate 9663676416" not in text
        else:
            assert sum(each.num_bytes for each in made.held) <= 9.5 * GIB


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate " + "9" * 400 + " bytes.",
        "Ran out of memory in memory space hbm. Used 9e9G of -1G hbm.",
        "Peak buffers:\n" + "Buffer 1:\n" * 3,
        "x" * 5_000_000,
        "",
        "\x00\x01\x02",
        "Out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:8kB",
    ],
)
def test_what_has_no_figures_is_refused_in_words(log: Log, text: str) -> None:
    with pytest.raises(InputError, match=r"no out-of-memory error|and no figure of it"):
        mw.explain_file(log(text))


def test_many_hostile_entries_take_no_square_of_time(log: Log) -> None:
    made = mw.explain_file(log("Peak buffers:\n" + "Buffer 1: Size: 1.00GiB " * 30_000))
    assert made.held[0].num_bytes <= 2**60


def test_command_prints_a_screen_and_writes_json_and_a_page(
    log: Log, tmp_path: Path, meshwright: Callable[..., Done]
) -> None:
    path = log(TPU)
    done = meshwright("explain", str(path), "--html", str(tmp_path / "page.html"))
    assert done.status == 0, done.talk
    assert len(done.output.splitlines()) < 50
    assert "the largest alone holds 6.00 GiB" in done.output
    assert "attention.py:88" in (tmp_path / "page.html").read_text()
    fields = meshwright("explain", str(path), "--json").json
    assert fields["missing_bytes"] == 5 * GIB
    assert fields["held"][0]["place"] == "attention.py:88"


def test_fleet_is_refused_where_the_message_has_the_devices_memory(log: Log) -> None:
    with pytest.raises(InputError, match="says itself"):
        mw.explain_file(log(TPU), on="8xH100")
