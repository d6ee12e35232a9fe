from meshwright.launch import Alone
from meshwright.training._loop import Agreement


class Several(Alone):
    count = 2


def test_alone_a_signal_is_what_it_is(mesh):
    agreement = Agreement(mesh(data=2), Alone(), waits=False)
    assert [agreement.on(signal) for signal in (None, 15)] == [None, 15]


def test_on_a_cpu_the_answer_is_that_of_the_step(mesh):
    agreement = Agreement(mesh(data=2, tensor=2), Several(), waits=True)
    assert [agreement.on(signal) for signal in (None, 15, None)] == [None, 15, None]


def test_on_an_accelerator_it_is_that_of_the_step_before(mesh):
    agreement = Agreement(mesh(data=2, tensor=2), Several(), waits=False)
    assert [agreement.on(signal) for signal in (None, 15, None)] == [None, None, 15]
