from meshwright.training._events import Phases


def test_a_phase_within_another_interrupts_it_and_all_add_up():
    readings = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    phases = Phases(lambda: next(readings))
    with phases.of("step"):  # at 1
        with phases.of("evaluation"):  # at 3
            assert phases.current == "evaluation"
        assert phases.current == "step"  # at 6
    assert phases.current == "start-up"  # at 10
    assert phases.seconds() == {"start-up": 1.0 + 5.0, "step": 2.0 + 4.0, "evaluation": 3.0}
