"""Traces: the step of median length, the seconds of each class in it, and what is refused."""

import gzip
import json
from pathlib import Path

import pytest

from meshwright.contrib.calibration import (
    ChromeTrace,
    TraceEvent,
    is_xplane,
    kineto_step,
    traced_step,
    xplane_events,
)
from meshwright.errors import InputError

CLASSES = {"dot.1": "matmul", "copy.2": "memory-bound", "all-reduce.3": "all-reduce"}
OTHERS = ("while.4", "tuple.5")


def event(name, begin, seconds, *, run="1", device="0", module="jit_step 6"):
    return TraceEvent(name=name, module=module, device=device, run=run, begin_seconds=begin, seconds=seconds)


def step(begin, run, slower=1.0):
    """Two devices side by side: a loop around a product, a copy and a message, and a gap of a second."""
    for device in "01":
        yield event("while.4", begin, 4 * slower, run=run, device=device)
        yield event("dot.1", begin, 2 * slower, run=run, device=device)
        yield event("copy.2", begin + 2 * slower, 1 * slower, run=run, device=device)
        yield event("all-reduce.3", begin + 4 * slower, 3 * slower, run=run, device=device)


def test_a_step_is_that_of_median_length_and_its_classes_are_of_one_device():
    events = [*step(0, "1"), *step(100, "2", slower=9), *step(300, "3")]
    found = traced_step(events, CLASSES, OTHERS, ())
    assert found.seconds == 7
    assert found.seconds_by_class == {"matmul": 2, "memory-bound": 1, "all-reduce": 3, "launch": 1}
    assert (found.matched, found.num_steps, found.num_devices) == (1.0, 3, 2)


def test_work_that_overlaps_leaves_no_gap_and_counts_in_its_class():
    events = [event("dot.1", 0, 4), event("all-reduce.3", 1, 4)]
    found = traced_step(events, CLASSES, OTHERS, ())
    assert (found.seconds, found.seconds_by_class) == (5, {"matmul": 4, "all-reduce": 4})
    assert found.exposed_by_class == {"matmul": 4, "all-reduce": 1}


def test_kernels_at_once_on_one_device_share_their_time():
    found = traced_step([event("dot.1", 0, 4), event("copy.2", 2, 4)], CLASSES, OTHERS, ())
    assert found.exposed_by_class == {"matmul": 3, "memory-bound": 3}
    assert found.seconds_by_class == {"matmul": 4, "memory-bound": 4}


def test_of_several_programs_the_one_that_matches_most_is_taken():
    other = [event("dot.1", 50, 1, module="jit_evaluate 7"), event("sort.9", 51, 99, module="jit_evaluate 7")]
    assert traced_step([*other, *step(0, "1")], CLASSES, OTHERS, ()).seconds == 7


def test_steps_without_a_run_are_counted_by_what_runs_once():
    events = [event("dot.1", place * 10, 2, run="") for place in range(3)]
    events += [event("copy.2", place * 5, 1, run="") for place in range(6)]
    found = traced_step(events, CLASSES, OTHERS, ["dot.1"])
    assert found.num_steps == 3
    assert found.seconds == pytest.approx(26 / 3)
    assert found.seconds_by_class["memory-bound"] == pytest.approx(2)
    with pytest.raises(InputError, match="does not tell its steps apart"):
        traced_step(events, CLASSES, OTHERS, ())


def graph_kernel(name, begin, seconds, launch, graph="command_buffer_1"):
    return TraceEvent(
        name=graph,
        module="jit_step 6",
        device="0",
        run="",
        begin_seconds=begin,
        seconds=seconds,
        kernel=name,
        launch=launch,
    )


def test_kernels_of_a_cuda_graph_have_the_class_of_their_own_names():
    """Two steps, each of a graph that holds a fusion and a product, and of one that a loop launches twice."""
    events = [
        each
        for step in range(2)
        for each in (
            graph_kernel("copy_2", step * 10, 1, str(step)),
            graph_kernel("nvjet_sm90_tst_128x256", step * 10 + 1, 3, str(step)),
            *(
                graph_kernel("memcpy128", step * 10 + 4 + n, 1, f"{step} {n}", "command_buffer_7")
                for n in (0, 1)
            ),
            graph_kernel("loop_of_nobody", step * 10 + 6, 0.5, str(step)),
        )
    ]
    found = traced_step(events, CLASSES, OTHERS, ["dot.1"])
    assert found.num_steps == 2
    assert found.seconds == 16 / 2  # from the first kernel to the last one with a class
    assert found.seconds_by_class == {"memory-bound": 3, "matmul": 3, "launch": 2}
    assert found.matched == pytest.approx(12 / 13)
    assert found.unmatched == {"loop_of_nobody": 1.0}


def test_a_trace_of_a_gpu_tells_steps_and_classes(tmp_path):
    """The trace of two steps of bytes-nano on one H200 (jax 0.11), without the planes of the host."""
    recorded = Path(__file__).with_name("h200_bytes_nano.xplane.pb.gz")
    file = tmp_path / "nano.xplane.pb"
    file.write_bytes(gzip.decompress(recorded.read_bytes()))
    events = list(xplane_events(file))
    fusions = {each.kernel for each in events if each.kernel.startswith(("loop_", "input_", "wrapped_"))}
    found = traced_step(events, dict.fromkeys(fusions, "memory-bound"), (), ())
    assert (found.num_steps, found.num_devices, found.matched) == (2, 1, 1.0)
    assert found.seconds == pytest.approx(1.23e-3, rel=0.01)
    assert set(found.seconds_by_class) == {"matmul", "attention", "memory-bound", "launch"}


def test_a_trace_without_kernels_says_what_the_profiler_needs():
    with pytest.raises(InputError, match="names no kernel of a compiled program") as error:
        traced_step([], CLASSES, OTHERS, ())
    assert "CUPTI" in error.value.hint


def test_a_trace_of_another_program_is_refused_with_the_share_and_the_largest_events():
    events = [event("dot.1", 0, 3), event("fusion.77", 3, 7)]
    with pytest.raises(InputError, match=r"30 % .* less than 80 %; .*: fusion.77"):
        traced_step(events, CLASSES, OTHERS, ())


def kernel(name, begin, dur, device=0):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": dur, "args": {"device": device}}


@pytest.fixture
def kineto(tmp_path):
    """Two steps of torch.profiler on one GPU, in microseconds; names as CUDA libraries spell them."""

    def write(name="trace.json"):
        steps = [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 0, "dur": 9}
            for n in (3, 4)
        ]
        one = [
            kernel("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN", 0, 400),
            kernel("void pytorch_flash::flash_fwd_kernel<...>", 400, 200),
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 500, 200),
            kernel("void at::native::vectorized_elementwise_kernel<4, ...>", 700, 100),
            kernel("sm80_xmma_fprop_implicit_gemm_conv", 900, 100),
        ]
        events = [*steps, *one, *({**each, "ts": each["ts"] + 1000} for each in one), {"ph": "M"}]
        text = json.dumps({"traceEvents": events}).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return write


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_kernels_of_pytorch_have_their_classes_by_name(kineto, name):
    found = kineto_step(kineto(name))
    assert found.seconds == pytest.approx(1e-3)
    by_class = {"matmul": 400, "attention": 200, "all-gather": 200, "memory-bound": 100, "convolution": 100}
    assert found.seconds_by_class == pytest.approx(
        {n: us * 1e-6 for n, us in by_class.items()} | {"launch": 1e-4}
    )
    assert found.num_steps == 2
    assert found.matched == pytest.approx(0.9)
    assert list(found.unmatched) == ["void at::native::vectorized_elementwise_kernel<4, ...>"]


def test_what_is_no_trace_is_refused_in_words(tmp_path, kineto):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"traceEvents": []}')
    (tmp_path / "c.xplane.pb").write_bytes(b"\xff" * 100)
    (tmp_path / "d.txt").write_text("")
    with pytest.raises(InputError, match="no trace at"):
        is_xplane(tmp_path / "none")
    with pytest.raises(InputError, match="is no trace by its name"):
        is_xplane(tmp_path / "d.txt")
    with pytest.raises(InputError, match="cannot be read as Chrome trace events"):
        kineto_step(tmp_path / "a.json")
    with pytest.raises(InputError, match="has no GPU kernels"):
        kineto_step(tmp_path / "b.json")
    with pytest.raises(InputError, match="cannot be read as a trace"):
        list(xplane_events(tmp_path / "c.xplane.pb"))
    with pytest.raises(InputError, match=r"holds no file that ends in .xplane.pb"):
        list(xplane_events(tmp_path / "empty"))
    assert not is_xplane(kineto())


WRONG = {
    "args": (None, "args = None is not an object"),
    "name": (5, "name = 5 is not text"),
    "ts": ("soon", "ts = 'soon' is no number of microseconds"),
    "dur": (1e308, "takes 1e[+]302 s, which cannot be"),
    "ph": ([], r"ph = \[\] is not text"),
}


@pytest.mark.parametrize(("field", "value", "words"), [(field, *wrong) for field, wrong in WRONG.items()])
def test_a_field_of_another_kind_is_named_with_its_event(field, value, words, kineto):
    path = kineto()
    events = json.loads(path.read_text())["traceEvents"]
    events[3][field] = value
    path.write_text(json.dumps(events))
    with pytest.raises(InputError, match=rf"trace\.json: event 3.*{words}"):
        kineto_step(path)


@pytest.mark.parametrize("field", ["name", "ts", "dur"])
def test_a_kernel_without_a_field_is_named(field, kineto):
    path = kineto()
    events = json.loads(path.read_text())["traceEvents"]
    del events[3][field]
    path.write_text(json.dumps(events))
    with pytest.raises(InputError, match=rf"event 3.* {'without a name' if field == 'name' else field}"):
        kineto_step(path)


@pytest.mark.parametrize("dur", [-1, float("nan"), float("inf"), True, 10**400, 1e14])
def test_a_duration_that_cannot_be_is_refused(dur, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([kernel("gemm", 0, dur)]))
    with pytest.raises(InputError, match=r"cannot be|no number of microseconds|has 401 digits"):
        kineto_step(path)


def test_events_that_lie_an_age_apart_and_kernels_without_time_are_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([kernel("gemm", 0, 5), kernel("gemm", 2**63, 5)]))
    with pytest.raises(InputError, match=r"events lie 9.22e\+12 s apart, which cannot be"):
        kineto_step(path)
    path.write_text(json.dumps([kernel("gemm", 0, 0), kernel("gemm", 5, 0)]))
    with pytest.raises(InputError, match="each of its 2 GPU kernels takes no time"):
        kineto_step(path)
    apart = [event("dot.1", begin, 2, run=run) for run, begin in (("1", 0), ("1", 1e12))]
    with pytest.raises(InputError, match="s apart, which cannot be"):
        traced_step(apart, CLASSES, OTHERS, ())


def test_a_long_name_takes_no_longer_than_its_letters(tmp_path):
    """With `nccl.*AllGather` this name took half a minute: a search from each of its beginnings."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([kernel("nccl" * 250_000, 0, 5), kernel("ncclDevKernel_SendRecv(x)", 5, 5)]))
    step = kineto_step(path)
    assert step.seconds_by_class == pytest.approx({"memory-bound": 5e-6, "all-to-all": 5e-6})
    assert max(map(len, step.unmatched)) <= 200


def read_by_parts(text: str, tmp_path, monkeypatch, chunk: int):
    from meshwright.contrib.calibration import _chrome_events

    monkeypatch.setattr(_chrome_events, "CHUNK_BYTES", chunk)
    path = tmp_path / "parts.json"
    path.write_text(text)
    trace = ChromeTrace(path)
    return [event.text("name") for event in trace], trace.about


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**20])
def test_events_are_the_same_wherever_the_file_is_divided(chunk, tmp_path, monkeypatch):
    names = ["a", 'b"]}', "\u00e9\\", "d\te", "x" * 200]
    events = [{"name": name, "args": {"n": [1, 22, -3.5e2, True, None]}} for name in names]
    about = {"schemaVersion": 12, "distributedInfo": {"rank": 3}, "traceName": "t"}
    whole = json.dumps(
        {"schemaVersion": 12, "distributedInfo": {"rank": 3}, "traceEvents": events, "traceName": "t"}
    )
    assert read_by_parts(whole, tmp_path, monkeypatch, chunk) == (names, about)
    assert read_by_parts(json.dumps(events, indent=1), tmp_path, monkeypatch, chunk) == (names, {})
    for cut in (len(whole) - 1, len(whole) // 2, 1):
        with pytest.raises(InputError, match="cannot be read as Chrome trace events: it is cut short"):
            read_by_parts(whole[:cut], tmp_path, monkeypatch, chunk)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"traceEvents": [{"name": "a"} {"name": "b"}]}', "a comma or ] is missing"),
        ('{"traceEvents": [{"name": a}]}' + " " * 500, "Expecting value: 'a}"),
        ('[{"name": "a"}] tail', "'tail' is behind its end"),
        ('{"traceEvents": {"a": 1}}', "its traceEvents are {'a': 1}, not a list"),
        ('{"a": []}', "it has no list of traceEvents"),
        ("[" * 100_000, "it is nested more than 100 levels deep"),
        ('[{"args": ' + "[" * 120 + "]" * 120 + "}]", "it is nested 121 levels deep"),
        ("5", "it has no list of traceEvents"),
    ],
)
def test_what_is_not_chromes_format_is_said_with_the_place(text, words, tmp_path, monkeypatch):
    with pytest.raises(InputError) as refused:
        read_by_parts(text, tmp_path, monkeypatch, 2**20)
    assert words in refused.value.message
