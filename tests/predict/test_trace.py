import json

from meshwright.predict._walk import Event, trace_of


def event(**changes):
    fields = dict(
        name="matmul",
        stream="compute",
        begin_seconds=0.5,
        seconds=0.25,
        module="layers/up",
        operation="dot.3",
    )
    return Event(**{**fields, **changes})


def test_a_kernel_is_a_slice_of_its_stream_in_microseconds():
    trace = trace_of([event()], "llama on 8xH100")
    (found,) = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (found["name"], found["cat"], found["ts"], found["dur"]) == (
        "layers/up: matmul",
        "matmul",
        5e5,
        2.5e5,
    )
    assert found["args"] == {"operation": "dot.3", "module": "layers/up"}


def test_each_stream_is_a_named_track():
    trace = trace_of([event(stream="between", name="all-gather[fsdp]", module="")], "x")
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {1: "computing", 2: "links inside the fast domain", 3: "links between domains"}
    (found,) = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (found["tid"], found["name"]) == (3, "all-gather[fsdp]")


def test_what_takes_no_time_is_not_drawn():
    assert [e for e in trace_of([event(seconds=0)], "x")["traceEvents"] if e["ph"] == "X"] == []


def test_it_is_json():
    assert json.loads(json.dumps(trace_of([event()], "x")))["displayTimeUnit"] == "ms"
