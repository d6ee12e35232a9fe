import os
import signal
import threading

import pytest

from meshwright.training._interrupt import noting_interrupts


def test_one_ctrl_c_is_noted_and_the_second_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with noting_interrupts() as stop_asked:
        assert not stop_asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_is_noted_and_nothing_breaks():
    answers: list[bool] = []

    def work() -> None:
        with noting_interrupts() as stop_asked:
            answers.append(stop_asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [False]
