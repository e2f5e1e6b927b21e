"""A run that ends while the requester's own code keeps it waiting, and signals while a run goes on."""

import asyncio
import os
import signal
import threading
import time

import pytest

from ravnest.coordinator.launch.interrupts import Interrupted, Interrupts, RunOver


def later(seconds: float, action: object, *arguments: object) -> None:
    threading.Timer(seconds, action, arguments).start()  # type: ignore[arg-type]


def test_a_blocking_step_is_broken_off_whenever_the_run_ends() -> None:
    # From before the call to within it, in steps finer than its start takes: a signal just before it blocks is lost.
    for microseconds in range(0, 400, 2):
        with Interrupts() as interrupts:
            wake = interrupts.wake
            ready = threading.Event()

            def end(ready: threading.Event = ready, wait: float = microseconds / 1e6, wake: object = wake) -> None:
                ready.wait()
                until = time.perf_counter() + wait
                while time.perf_counter() < until:
                    pass
                wake()  # type: ignore[operator]

            thread = threading.Thread(target=end)
            thread.start()
            started = time.perf_counter()
            with pytest.raises(RunOver), interrupts.users_code():
                ready.set()
                threading.Event().wait(30)
            thread.join()
            assert time.perf_counter() - started < 15


def test_a_step_that_ends_by_itself_raises_at_its_end() -> None:
    reached = []
    with Interrupts() as interrupts, pytest.raises(Interrupted) as raised, interrupts.users_code():
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("end of the step")
    assert reached == ["end of the step"]
    assert raised.value.exit_code == 128 + signal.SIGTERM


def test_a_step_that_goes_on_after_an_interrupt_is_broken_off() -> None:
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.users_code():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(30)
        pytest.fail("the step was not broken off")


def test_the_end_of_the_run_is_no_interrupt_outside_of_the_requesters_code() -> None:
    with Interrupts() as interrupts:
        later(0.0, interrupts.wake)
        threading.Event().wait(0.3)
        with pytest.raises(RunOver), interrupts.users_code():
            pytest.fail("the step must not begin")


def test_a_closed_terminal_stops_the_run() -> None:
    with Interrupts(), pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGHUP)
        threading.Event().wait(30)


def test_a_second_signal_while_stopping_hurries() -> None:
    hurried = []
    with Interrupts() as interrupts:
        interrupts.hurry = lambda: hurried.append(True)
        interrupts.stopping = True
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(30)
    assert hurried == [True]


def test_handlers_are_put_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGURG, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.users_code():
        os.kill(os.getpid(), signal.SIGTERM)
    assert {number: signal.getsignal(number) for number in numbers} == before


def test_a_forked_worker_ends_of_a_signal() -> None:
    with Interrupts():
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def test_a_signal_just_before_a_call_that_blocks_is_not_lost() -> None:
    # From before the call to within it, in steps finer than its start takes.
    for microseconds in range(0, 200, 4):
        with Interrupts():
            ready = threading.Event()

            def ask(ready: threading.Event = ready, wait: float = microseconds / 1e6) -> None:
                ready.wait()
                until = time.perf_counter() + wait
                while time.perf_counter() < until:
                    pass
                os.kill(os.getpid(), signal.SIGTERM)

            thread = threading.Thread(target=ask)
            thread.start()
            started = time.perf_counter()
            with pytest.raises(Interrupted):
                ready.set()
                threading.Event().wait(30)
            thread.join()
            assert time.perf_counter() - started < 15


def test_an_event_loop_on_the_main_thread_keeps_its_own_note_of_signals() -> None:
    async def inside() -> None:
        before = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(before)
        with Interrupts():
            now = signal.set_wakeup_fd(before)
        assert now == before

    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: None)
    try:
        loop.run_until_complete(inside())
    finally:
        loop.close()
