"""Transfers of state take turns: behind the foreground, by priority, within the budget, and cancelled at no cost."""

import asyncio
import math
import threading

import pytest

from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.state_rate import StateKind

HOME = 10e6 / 8
SLOWEST = 1e6 / 8


class Line:
    """A budget on a line, on a clock that the test moves; transfers are driven without an event loop."""

    def __init__(self, rate: float = HOME) -> None:
        self.now = 100.0
        self.budget = StateBudget(clock=lambda: self.now)
        self.budget.measured(rate)
        self.rate = rate

    def send(self, seconds: float, *kinds: StateKind, each: float = 0.0, size: int = 0) -> dict[StateKind, int]:
        """Bytes that endless transfers of these kinds get through, while a frame of `size` bytes of the foreground is
        sent every `each` seconds; without one, tiny frames show that the machine trains."""
        each, size = each or 1.0, size or 1
        sent = dict.fromkeys(kinds, 0)
        piece, end, next_frame = self.budget.piece_bytes, self.now + seconds, self.now + each
        self.budget.queued(1)
        self.budget.written(1)
        tickets = {kind: self.budget.join(kind, piece, lambda: None) for kind in kinds}
        while self.now < end:
            wait = math.inf
            for kind, ticket in list(tickets.items()):
                left = self.budget.attempt(ticket)
                if left == 0.0:
                    sent[kind] += piece
                    self.budget.leave(ticket)
                    tickets[kind] = self.budget.join(kind, piece, lambda: None)
                wait = min(wait, left)
            if wait > 0:
                self.now = min(self.now + wait, next_frame, end)
            if self.now >= next_frame:
                self.budget.queued(size)
                self.budget.written(size)
                next_frame += each
        for ticket in tickets.values():
            self.budget.leave(ticket)
        return sent


@pytest.mark.parametrize("rate", [SLOWEST, HOME, 125e6])
def test_state_alone_takes_its_budget_on_average(rate: float) -> None:
    line = Line(rate)
    sent = line.send(60.0, "replica")["replica"]
    assert 0.14 * rate <= sent / 60.0 <= 0.16 * rate


@pytest.mark.parametrize("rate", [SLOWEST, HOME, 125e6])
@pytest.mark.parametrize("used", [0.4, 0.8, 0.92, 1.5])
def test_state_beside_the_foreground_takes_no_more_than_is_left_and_no_less_than_its_floor(
    rate: float, used: float
) -> None:
    line = Line(rate)
    line.send(20.0, "replica", each=0.2, size=int(0.2 * used * rate))
    sent = line.send(60.0, "replica", each=0.2, size=int(0.2 * used * rate))["replica"]
    allowed = min(0.15, max(0.03, 0.9 * (1 - used)))
    assert 0.02 * rate <= sent / 60.0 <= 1.1 * allowed * rate


def test_an_activation_finds_one_small_piece_in_its_way_at_most() -> None:
    line = Line()
    piece = line.budget.piece_bytes
    assert piece / HOME <= 0.026
    line.now += 60.0
    ticket = line.budget.join("replica", piece, lambda: None)
    assert line.budget.attempt(ticket) == 0.0
    line.budget.leave(ticket)
    again = line.budget.join("replica", piece, lambda: None)
    # There is credit, and the line is still busy with the piece before.
    assert line.budget.attempt(again) >= piece / HOME


def test_state_yields_while_bytes_of_the_foreground_wait_and_is_woken_when_they_are_gone() -> None:
    line, woken = Line(), []
    piece = line.budget.piece_bytes
    first = line.budget.join("replica", piece, lambda: None)
    assert line.budget.attempt(first) == 0.0
    line.budget.leave(first)
    line.now += 0.2
    line.budget.queued(1000)
    ticket = line.budget.join("replica", piece, lambda: woken.append(line.now))
    assert line.budget.attempt(ticket) > 0
    line.budget.written(1000)
    assert woken
    line.now += 0.01
    assert line.budget.attempt(ticket) == 0.0


def test_the_floor_holds_while_a_frame_cannot_be_written_at_all() -> None:
    line = Line()
    line.budget.queued(1 << 30)
    sent = line.send(60.0, "replica")["replica"]
    assert sent / 60.0 == pytest.approx(0.03 * HOME, rel=0.1)
    line.budget.dropped(1 << 30)
    assert line.send(60.0, "replica")["replica"] / 60.0 > 0.14 * HOME


def test_a_round_goes_before_a_replica_and_a_checkpoint_and_none_of_them_starves() -> None:
    line = Line()
    sent = line.send(60.0, "artifact", "checkpoint", "replica")
    assert sent["replica"] > 3 * sent["checkpoint"]
    assert min(sent["checkpoint"], sent["artifact"]) / 60.0 > 0.009 * HOME
    sent = line.send(60.0, "round", "replica")
    assert sent["round"] / 60.0 > 0.8 * HOME and sent["replica"] / 60.0 > 0.009 * HOME


def test_waiting_transfers_keep_their_share_on_a_line_that_is_full() -> None:
    line = Line(SLOWEST)
    line.send(20.0, "replica", each=1.0, size=int(2 * SLOWEST))
    sent = line.send(600.0, "replica", "checkpoint", "part", each=1.0, size=int(2 * SLOWEST))
    assert min(sent.values()) / 600.0 > 0.008 * SLOWEST


def test_state_of_a_machine_that_does_not_train_takes_the_line_and_control_messages_do_not_count_as_training() -> None:
    line = Line()
    for _ in range(100):
        line.now += 0.5
        line.budget.control.queued(500)
        line.budget.control.written(500)
    assert line.budget.rate("checkpoint")[0] > 0.85 * HOME
    line.budget.queued(1)
    line.budget.written(1)
    assert line.budget.rate("checkpoint")[0] == pytest.approx(0.15 * HOME)
    line.now += 11.0
    assert line.budget.rate("checkpoint")[0] > 0.85 * HOME


def test_a_machine_that_leaves_hands_its_state_over_at_once_and_yields_all_the_same() -> None:
    line = Line()
    line.budget.queued(1)
    line.budget.written(1)
    line.budget.lift()
    assert line.send(60.0, "replica")["replica"] / 60.0 > 0.8 * HOME
    line.send(20.0, "replica", each=0.2, size=int(0.2 * HOME))
    sent = line.send(60.0, "replica", each=0.2, size=int(0.2 * HOME))["replica"]
    assert sent / 60.0 == pytest.approx(0.03 * HOME, rel=0.2)


def test_a_month_that_runs_out_reduces_state() -> None:
    line = Line()
    line.budget.reduce(0.2)
    assert line.send(60.0, "replica")["replica"] / 60.0 == pytest.approx(0.03 * HOME, rel=0.1)
    assert "reduced to 20%" in line.budget.rate()[1]


def test_the_foreground_on_the_same_network_takes_nothing_of_a_line_that_leads_outside() -> None:
    line = Line()
    traffic = line.budget.nearby
    traffic.queued(int(10 * HOME))
    traffic.written(int(10 * HOME))
    traffic.delivered(int(10 * HOME), 0.1)
    assert line.budget.line_bytes_per_second == HOME
    assert line.budget.rate("replica")[0] == pytest.approx(0.15 * HOME), "it trains"
    assert line.send(60.0, "replica")["replica"] / 60.0 > 0.14 * HOME


def test_a_machine_that_leaves_at_its_monthly_cap_hands_its_state_over_in_time() -> None:
    line = Line()
    line.budget.reduce(0.0)
    line.budget.lift()
    assert line.send(60.0, "replica")["replica"] / 60.0 > 0.8 * HOME
    assert "reduced" not in line.budget.rate()[1]


def test_what_is_urgent_and_a_budget_without_limits_wait_for_nothing() -> None:
    async def test() -> None:
        line = Line()
        line.budget.queued(1 << 30)
        await line.budget.turn(1 << 30, "part", urgent=True)
        free = StateBudget.unlimited()
        await free.turn(1 << 40, "replica")
        free.wait_turn(1 << 40, "round")
        assert free.piece_bytes == 256 << 10

    asyncio.run(asyncio.wait_for(test(), 5.0))


def test_urgent_bytes_occupy_the_line_for_other_state() -> None:
    line = Line()
    line.now += 10.0
    line.budget.took_at_once(int(0.2 * HOME))
    ticket = line.budget.join("replica", line.budget.piece_bytes, lambda: None)
    assert line.budget.attempt(ticket) == pytest.approx(0.2, rel=0.05)


def test_a_cancelled_turn_takes_nothing_and_lets_the_next_one_pass() -> None:
    async def test() -> None:
        budget = StateBudget()
        budget.measured(1e9)
        budget.queued(1)
        waiting = [asyncio.create_task(budget.turn(1 << 30, kind)) for kind in ("replica", "checkpoint")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first = asyncio.create_task(budget.turn(1, "round"))
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        budget.written(1)
        await first

    asyncio.run(asyncio.wait_for(test(), 5.0))


def test_loops_and_threads_share_one_budget() -> None:
    budget = StateBudget()
    budget.measured(200e6)
    passed: list[str] = []

    def work() -> None:
        for _ in range(5):
            budget.wait_turn(100_000, "round")
        passed.append("thread")

    async def test() -> None:
        for _ in range(5):
            await budget.turn(100_000, "replica")
        passed.append("loop")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    asyncio.run(asyncio.wait_for(test(), 20.0))
    for thread in threads:
        thread.join(20.0)
    assert sorted(passed) == ["loop", "thread", "thread"]


def test_a_thread_that_is_no_longer_wanted_does_not_wait() -> None:
    budget = StateBudget()
    budget.queued(1)
    budget.wait_turn(1 << 40, "round", is_over=lambda: True)


def test_a_receiver_with_a_slow_line_limits_its_transfer_alone() -> None:
    async def test() -> list[float]:
        now = [0.0]
        budget = StateBudget(clock=lambda: now[0])
        budget.measured(1e12)
        slept: list[float] = []
        transfer = budget.transfer("replica", max_bytes_per_second=1e6)
        assert transfer.piece_bytes == 25_000

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            now[0] += seconds

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            for _ in range(4):
                await transfer.turn(1_000_000)
        return slept

    assert asyncio.run(asyncio.wait_for(test(), 5.0)) == pytest.approx([1.0, 1.0, 1.0], rel=1e-3)
