"""A checkpoint whose parts do not come costs the provider that does not send its own, wherever it can be replaced."""

import asyncio

import pytest

from ravnest.coordinator.checkpoints.saver import Awaited
from ravnest.coordinator.health.checkpoint_watch import SAVING_SECONDS, CheckpointWatch, judge_part
from ravnest.coordinator.health.lease import Replacement
from ravnest.coordinator.health.stalls import DEFAULT_TIMEOUTS
from ravnest.coordinator.swarm.members import LentMachine, Member, Members
from ravnest.coordinator.swarm.uploads import UploadProgress
from ravnest.net.pacing.state_rate import DEFAULT_SETTINGS, piece_bytes
from ravnest.net.probe.measuring import LinkSpeed

HOME = 10e6 / 8
STATE = 63_000_000


def test_a_part_that_comes_at_the_rate_of_its_line_is_waited_for_however_long_it_takes() -> None:
    for seconds in (5.0, 50.0, 200.0):
        given_up, why = judge_part(UploadProgress(int(seconds * HOME / 2), seconds, 0.5), 0.5, HOME, "standby")
        assert not given_up and "have arrived, the last bytes arrived" in why


def test_a_part_of_which_nothing_comes_is_waited_for_as_long_as_a_stage_that_does_nothing() -> None:
    replacements: tuple[Replacement, ...] = ("standby", "reform")
    for replacement in replacements:
        limit = DEFAULT_TIMEOUTS.seconds(replacement)
        assert not judge_part(None, limit - 1.0, HOME, replacement)[0]
        given_up, why = judge_part(None, limit, HOME, replacement)
        assert given_up and why.startswith(f"nothing has arrived for {limit:.0f} s, and ")


def test_a_stage_whose_work_takes_long_may_take_as_long_to_begin() -> None:
    assert not judge_part(None, 90.0, HOME, "standby", patience_seconds=100.0)[0]
    assert judge_part(None, 100.0, HOME, "standby", patience_seconds=100.0)[0]


def test_a_part_that_has_stopped_coming_or_trickles_is_given_up_with_how_much_has_come() -> None:
    given_up, why = judge_part(UploadProgress(12_000_000, 60.0, 40.0), 40.0, HOME, "reform")
    assert given_up
    assert why == "12 MB have arrived, nothing has arrived for 40 s, and the others can go on without it"
    assert judge_part(UploadProgress(200_000, 60.0, 0.1), 0.1, HOME, "reform")[0]


def test_nobody_is_given_up_whose_place_nobody_can_take() -> None:
    for sent in (None, UploadProgress(0, 1e4, 1e4)):
        given_up, why = judge_part(sent, 1e4, HOME, "none")
        assert not given_up and "no other provider can take its place" in why


class ConnectedMember(Member):
    """A provider without links that counts as connected."""

    @property
    def present(self) -> bool:
        return True


class Watched:
    """A checkpoint that two providers are to save, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lost: list[tuple[str, str]] = []
        self.awaited: Awaited | None = Awaited("checkpoint-7", 1000.0, ("anna", "ben"))
        self.members = Members()
        for name in ("anna", "ben"):
            self.members.put(ConnectedMember(name, "", LentMachine("cpu", 1)))
        replaced: Replacement = "standby"
        self.watch = CheckpointWatch(
            self.members, lambda: self.awaited, lambda node: replaced, self._give_up, clock=lambda: self.now
        )

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.watch.look()

    def _give_up(self, node_id: str, reason: str) -> None:
        self.lost.append((node_id, reason))
        assert self.awaited is not None
        self.awaited = self.awaited._replace(nodes=tuple(node for node in self.awaited.nodes if node != node_id))


async def _made(line: float = 0.0) -> Watched:
    made = Watched()
    if line:
        for name in ("anna", "ben"):
            made.members[name].link.speed = LinkSpeed(0.03, line, line)
    return made


def test_the_one_of_whom_nothing_comes_is_given_up_and_the_one_that_sends_is_not() -> None:
    async def test() -> None:
        made = await _made()
        with made.members["anna"].uploads.track("checkpoint-7") as upload:
            upload.began_at = upload.moved_at = made.now
            for _ in range(30):
                upload.done_bytes += 1 << 20
                upload.moved_at = made.now
                made.wait(1)
        assert [node for node, _ in made.lost] == ["ben"]
        assert made.lost[0][1] == (
            "its state was asked for 11 s ago (checkpoint-7): nothing has arrived for 10 s, and a standby is ready"
        )

    asyncio.run(test())


def test_a_coordinator_that_was_stopped_itself_gives_nobody_up_for_that() -> None:
    async def test() -> None:
        made = await _made()
        made.wait(2)
        made.now += 100.0
        made.watch.look()
        made.wait(8)
        assert made.lost == []
        made.wait(3)
        assert [node for node, _ in made.lost] == ["anna", "ben"], "nothing comes after that either"

    asyncio.run(test())


def test_a_stage_that_writes_its_state_to_a_slow_disk_is_believed_for_some_minutes() -> None:
    assert not judge_part(None, 60.0, HOME, "standby", is_saving=True)[0]
    assert judge_part(None, SAVING_SECONDS, HOME, "standby", is_saving=True)[0], "a claim does not last"


@pytest.mark.parametrize("line", [1e6 / 8, HOME])
def test_a_part_on_a_line_that_is_full_of_activations_costs_nobody_its_place(line: float) -> None:
    async def test() -> None:
        made = await _made(line)
        share, piece = DEFAULT_SETTINGS.transfer_share * line, piece_bytes(line)
        with made.members["anna"].uploads.track("checkpoint-7") as upload:
            upload.began_at = upload.moved_at = made.now
            for second in range(3600):
                if int(share * second) - upload.done_bytes >= piece:
                    upload.done_bytes += piece
                    upload.moved_at = made.now
                made.wait(1)
        assert [node for node, _ in made.lost] == ["ben"], "it only claims to upload"

    asyncio.run(test())
