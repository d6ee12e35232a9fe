import pytest

from meshwright.ledger._loops import trips_of

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
    [{"direction": "NE"}, {"operation": "multiply"}, {"step": "-1"}, {"state": "foreign"}, {"limit": "nan"}],
)
def test_any_other_loop_has_no_known_count(module, change):
    assert loop(module, **change) is None


def test_tpu_loops_count_as_their_scans(samples):
    program = samples.program("transformer-v5e-8")
    loops = [(c, i) for c, i in program.instructions() if i.opcode == "while"]
    assert [i.trip_count for _, i in loops] == [None, None]
    assert [trips_of(program, c, i) for c, i in loops] == [4, 4]


def test_the_compilers_own_count_comes_first(samples):
    program = samples.program("transformer-8xCPU")
    loops = [(c, i) for c, i in program.instructions() if i.opcode == "while"]
    assert [trips_of(program, c, i) for c, i in loops] == [4, 4]
