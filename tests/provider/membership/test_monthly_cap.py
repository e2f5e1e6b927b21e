"""A month's data is counted on the disk for all providers of a user: state yields first, then the provider leaves."""

import asyncio
import json
from pathlib import Path

import pytest

from ravnest.errors import RunError
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.traffic_limit import Traffic, UserLimits
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.provider.membership.link_measurements import within
from ravnest.provider.membership.monthly_cap import MonthlyCap, MonthlyCount, state_share

GB = 10**9


def made(folder: Path, cap: int = 200 * GB) -> tuple[MonthlyCap, Traffic, StateBudget]:
    traffic, budget = Traffic(), StateBudget()
    return MonthlyCap(cap, MonthlyCount(folder), traffic, budget), traffic, budget


def test_state_is_reduced_when_the_cap_is_near_and_the_provider_leaves_before_it_is_exceeded() -> None:
    assert state_share(100 * GB, 200 * GB)[0] == 1.0
    shares = [state_share(used * GB, 200 * GB)[0] for used in range(160, 196)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0 and shares[-1] >= 0.2
    share, reason = state_share(196 * GB, 200 * GB)
    assert share == 0.0 and reason.endswith("the monthly cap is reached")


def test_the_count_goes_on_after_a_restart_and_begins_again_with_the_month(tmp_path: Path) -> None:
    month = "2026-11"
    assert MonthlyCount(tmp_path, lambda: month).add(5) == 5
    assert MonthlyCount(tmp_path, lambda: month).add(7) == 12
    month = "2026-12"
    assert MonthlyCount(tmp_path, lambda: month).add(1) == 1
    assert json.loads((tmp_path / "traffic.json").read_text()) == {"month": "2026-12", "bytes": 1}


def test_two_providers_of_one_user_share_the_count(tmp_path: Path) -> None:
    (one, first, _), (other, second, budget) = made(tmp_path, 100), made(tmp_path, 100)
    first.sent.take(60)
    second.received.take(25)
    assert one.update()[0] == 1.0
    assert 0 < other.update()[0] < 1 and "reduced" in budget.rate()[1]
    assert one.update()[1].startswith("85 B of 100 B"), "bytes count once"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"month": "2026-11", "bytes": -1}', b'{"bytes": "many"}']
)
def test_a_damaged_count_is_told_and_begins_again(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "traffic.json").write_bytes(data)
    said: list[str] = []
    count = MonthlyCount(tmp_path, say=said.append)
    assert (count.add(1), count.add(2)) == (1, 3)
    [line] = said
    assert "was damaged" in line and "begins again at 0" in line
    assert (tmp_path / "traffic.damaged").read_bytes() == data


def test_a_count_that_cannot_be_read_or_written_is_an_error_and_no_reason_to_start_at_zero(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").mkdir()
    with pytest.raises(RunError, match=r"cannot count this month's traffic in .*traffic.json"):
        MonthlyCount(tmp_path).add(1)


def test_a_count_that_could_not_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    count = MonthlyCount(tmp_path)
    count.add(5)
    (tmp_path / "traffic.new").mkdir()
    with pytest.raises(RunError, match="cannot count"):
        count.add(7)
    (tmp_path / "traffic.new").rmdir()
    assert count.add(1) == 6


def test_a_provider_does_not_join_in_a_month_whose_data_is_used_up(tmp_path: Path) -> None:
    cap, traffic, _ = made(tmp_path, 100)
    cap.check()
    traffic.sent.take(99)
    with pytest.raises(RunError, match="the monthly cap is reached; raise --monthly-cap, or join again next month"):
        cap.check()


def test_the_provider_is_asked_to_leave_once_and_told_why(tmp_path: Path) -> None:
    async def test() -> None:
        cap, traffic, _ = made(tmp_path, 100)
        traffic.received.take(98)
        reasons: asyncio.Queue[str] = asyncio.Queue()
        said: list[str] = []
        watching = asyncio.create_task(cap.watch(reasons.put_nowait, said.append))
        reason = await reasons.get()
        assert "98 B of 100 B were used this month" in reason and said == [reason]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 10.0))


def test_the_coordinator_hears_of_no_rate_that_the_user_does_not_allow() -> None:
    speed = within(LinkSpeed(0.03, 5e6, 30e6), UserLimits(2e6, 10e6))
    assert speed == LinkSpeed(0.03, 2e6, 10e6)
    assert within(speed, UserLimits()) == speed
