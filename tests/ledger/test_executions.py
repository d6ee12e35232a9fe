import pytest

from meshwright.hlo import trips_of

COUNTED = """%test (p: (s32[], f32[])) -> pred[] {{
  %p = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant({limit})
  ROOT %lt = pred[] compare(%i, %n), direction={direction}
}}

%body (q: (s32[], f32[])) -> (s32[], f32[]) {{
  %q = (s32[], f32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %one = s32[] constant({step})
  %next = s32[] {operation}(%j, %one)
  %copied = s32[] copy(%next)
  %x = f32[] get-tuple-element(%q), index=1
  ROOT %t = (s32[], f32[]) tuple(%copied, %x)
}}
"""


def loop(module, *, limit="4", start="0", step="1", direction="LT", operation="add", state="tuple"):
    before = COUNTED.format(limit=limit, step=step, direction=direction, operation=operation)
    program = module(
        f"%start = s32[] constant({start})",
        "%copy = s32[] copy(%start)",
        "%v = f32[] parameter(0)",
        f"%state = (s32[], f32[]) {state}(%copy, %v)",
        "ROOT %w = (s32[], f32[]) while(%state), condition=%test, body=%body",
        before=before,
    )
    return trips_of(program, program.entry, program.entry.root)


@pytest.mark.parametrize(("start", "limit", "step"), [(0, 4, 1), (2, 10, 3), (-5, 6, 2), (3, 4, 9)])
def test_a_counted_loop_runs_as_often_as_pythons_range(module, start, limit, step):
    trips = loop(module, start=str(start), limit=str(limit), step=str(step))
    assert trips == len(range(start, limit, step))


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "divide"},  # no rule
        {"operation": "multiply"},  # nought stays nought: it never ends
        {"state": "foreign"},
        {"limit": "nan"},
    ],
)
def test_any_other_loop_has_no_known_count(module, change, monkeypatch):
    monkeypatch.setattr("meshwright.hlo._walks.MOST_ROUNDS", 1000)
    assert loop(module, **change) is None


@pytest.mark.parametrize(
    ("direction", "start", "limit", "step", "trips"),
    [("NE", 0, 4, 1, 4), ("GT", 9, 0, -2, 5), ("GE", 9, 0, -3, 4), ("LE", 0, 4, 2, 3), ("LT", 5, 4, 1, 0)],
)
def test_any_comparison_ends_a_loop(module, direction, start, limit, step, trips):
    found = loop(module, direction=direction, start=str(start), limit=str(limit), step=str(step))
    assert found == trips


PEELED = """%less (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %n = s32[] constant(31)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%test (p: (s32[], f32[], pred[])) -> pred[] {
  %p = (s32[], f32[], pred[]) parameter(0)
  %c = s32[] get-tuple-element(%p), index=0
  %inside = pred[] fusion(%c), kind=kLoop, calls=%less
  ROOT %both = pred[] and(%inside, %p#2)
}

%plus (j: s32[]) -> (f32[], s32[]) {
  %j = s32[] parameter(0)
  %one = s32[] constant(1)
  %zero = f32[] constant(0)
  %sum = s32[] add(%j, %one)
  ROOT %t = (f32[], s32[]) tuple(%zero, %sum)
}

%body (q: (s32[], f32[], pred[])) -> (s32[], f32[], pred[]) {
  %q = (s32[], f32[], pred[]) parameter(0)
  %fused = (f32[], s32[]) fusion(%q#0), kind=kLoop, calls=%plus
  ROOT %r = (s32[], f32[], pred[]) tuple(%fused#1, %q#1, %q#2)
}
"""


def test_a_counter_is_followed_through_fusions_and_compacted_elements(module):
    program = module(
        "%v = f32[] parameter(0)",
        "%first = s32[] constant(1)",
        "%yes = pred[] constant(true)",
        "%state = (s32[], f32[], pred[]) tuple(%first, %v, %yes)",
        "ROOT %w = (s32[], f32[], pred[]) while(%state), condition=%test, body=%body",
        before=PEELED,
    )
    assert trips_of(program, program.entry, program.entry.root) == 30


def test_a_loop_over_data_has_no_known_count(module):
    program = module(
        "%v = f32[] parameter(0)",
        "%first = s32[] parameter(1)",
        "%yes = pred[] constant(true)",
        "%state = (s32[], f32[], pred[]) tuple(%first, %v, %yes)",
        "ROOT %w = (s32[], f32[], pred[]) while(%state), condition=%test, body=%body",
        before=PEELED,
    )
    assert trips_of(program, program.entry, program.entry.root) is None


def test_tpu_loops_count_as_their_scans(samples):
    program = samples.program("transformer-v5e-8")
    loops = [(c, i) for c, i in program.instructions() if i.opcode == "while"]
    assert [i.trip_count for _, i in loops] == [None, None]
    assert [trips_of(program, c, i) for c, i in loops] == [4, 4]


def test_the_compilers_own_count_comes_first(samples):
    program = samples.program("transformer-8xCPU")
    loops = [(c, i) for c, i in program.instructions() if i.opcode == "while"]
    assert [trips_of(program, c, i) for c, i in loops] == [4, 4]
