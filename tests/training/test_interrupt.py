import os
import signal
import threading

import pytest

from meshwright.training._loop import noting_signals


def test_one_ctrl_c_is_noted_and_the_second_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with noting_signals() as asked:
        assert asked() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert asked() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_is_noted_however_often_it_comes():
    before = signal.getsignal(signal.SIGTERM)
    with noting_signals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_nothing_is_noted_and_nothing_breaks():
    answers: list[int | None] = []

    def work() -> None:
        with noting_signals() as asked:
            answers.append(asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [None]
