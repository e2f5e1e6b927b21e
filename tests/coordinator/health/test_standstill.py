"""Why nothing is completed follows from what the stages say: who waits for what, and for whom in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.coordinator.health.standstill import (
    FIRST_SECONDS,
    MIN_SECONDS,
    ClusterNow,
    CompletionPace,
    RunNow,
    StageNow,
    StateSent,
    explain,
)
from ravnest.coordinator.health.standstill_watch import StandstillWatch, stage_now
from ravnest.engine.telemetry.activity import ANY, Missing, MissingKind, missing_messages
from ravnest.net.v1 import control_pb2
from ravnest.net.v1.control_pb2 import Report


def waits(node: str, *missing: tuple[MissingKind, int], silent: float = 0.0) -> StageNow:
    return StageNow(node, silent, missing=tuple(Missing(what, number, 1) for what, number in missing))


def works(node: str, kind: str = "forward", seconds: float = 40.0) -> StageNow:
    return StageNow(node, kind=kind, microbatch=17, seconds=seconds)


def told(
    *stages: StageNow, under_way: tuple[int, ...] = (17,), **more: float | tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    found = explain(RunNow("training", (ClusterNow(0, stages, under_way),), **more))  # type: ignore[arg-type]
    return found.reason, found.culprits


def test_the_stage_at_work_for_which_the_others_wait_is_named() -> None:
    reason, culprits = told(waits("a", ("gradient", 17)), waits("b", ("gradient", 17)), works("c"))
    assert reason == (
        "stage 0 (a) waits for the gradient of microbatch 17 from stage 1 (b), which waits for the gradient of "
        "microbatch 17 from stage 2 (c), which has been at forward of microbatch 17 for 40 s"
    )
    assert culprits == ("c",)


def test_a_stage_that_sends_its_state_is_named_with_how_far_it_is() -> None:
    sends = StageNow("b", kind="save", seconds=30.0, sends=StateSent(12_000_000, 63_000_000, 0.5))
    reason, culprits = told(waits("a", ("gradient", 17)), sends)
    assert reason == (
        "stage 0 (a) waits for the gradient of microbatch 17 from stage 1 (b), which sends its state, 12 MB of 63 MB"
    )
    assert culprits == ("b",)
    stuck = StageNow("b", kind="save", sends=StateSent(12_000_000, 63_000_000, 25.0))
    assert told(waits("a", ("gradient", 17)), stuck)[0].endswith("12 MB of 63 MB, nothing of it for 25 s")


def test_a_stage_that_is_not_heard_is_named_whatever_it_said_last() -> None:
    reason, culprits = told(waits("a", ("gradient", 17)), waits("b", ("forward", ANY), silent=12.0))
    assert reason.endswith("from stage 1 (b), which has not been heard for 12 s") and culprits == ("b",)


def test_a_root_that_says_it_waits_for_what_it_was_fed_is_named() -> None:
    reason, culprits = told(waits("a", ("feed", ANY)), waits("b", ("forward", 17)))
    assert reason == (
        "stage 1 (b) waits for the forward of microbatch 17 from stage 0 (a), which waits for its feed, though it "
        "was fed microbatch 17"
    )
    assert culprits == ("a",)
    assert told(waits("a", ("gradient", 17)), waits("b", ("feed", 17)))[1] == ("b",)


def test_of_two_that_wait_for_each_other_both_are_named_and_what_is_on_the_way() -> None:
    leaf = StageNow("b", missing=(Missing("forward", 17, 1),), unconfirmed=(("a", 3),))
    reason, culprits = told(waits("a", ("gradient", 17)), leaf)
    assert reason == (
        "stage 0 (a) waits for the gradient of microbatch 17 from stage 1 (b), which waits for the forward of "
        "microbatch 17 from that one: one of the two does not do its part, or nothing passes between them (3 frames "
        "are not confirmed)"
    )
    assert set(culprits) == {"a", "b"}


def test_nothing_comes_back_of_an_evaluation_so_either_may_have_lost_it() -> None:
    reason, culprits = told(waits("a", ("feed", ANY)), waits("b", ("forward", -4)), under_way=(-4,))
    assert "though it was fed microbatch -4" in reason and culprits == ("a", "b")


def test_where_nothing_is_under_way_it_is_the_data_or_what_the_coordinator_waits_for() -> None:
    idle = waits("a", ("feed", ANY)), waits("b", ("forward", ANY))
    assert told(*idle, under_way=(), data_seconds=40.0) == ("the data loader has not yielded a batch for 40 s", ())
    assert told(*idle, under_way=(), waits=("a round is under way",)) == ("a round is under way", ())
    assert told(*idle, under_way=())[0] == "the run is at 'training', and no stage says what it waits for"
    assert explain(RunNow("planning")).reason == "the run is at 'planning'"


def test_data_is_not_blamed_while_a_stage_has_something_to_do() -> None:
    assert "data loader" not in told(works("a"), data_seconds=40.0)[0]


def test_a_stage_that_saves_with_nothing_under_way_is_named_beside_the_checkpoint() -> None:
    saves = StageNow("b", kind="save", sends=StateSent(0, 63_000_000, 1.0))
    reason, _ = told(waits("a", ("feed", ANY)), saves, under_way=(), waits=("a checkpoint is being written",))
    assert reason == "stage 1 (b) sends its state, 0 bytes of 63 MB; a checkpoint is being written"


def test_a_cluster_that_is_formed_again_says_why_and_several_say_which_they_are() -> None:
    forming = ClusterNow(0, (waits("a", ("feed", ANY)),), (3,), "b is gone")
    other = ClusterNow(1, (waits("c", ("gradient", 4)), works("d")), (4,))
    reason = explain(RunNow("training", (forming, other))).reason
    assert reason.startswith("cluster 0 is not complete: b is gone; stage 0 of cluster 1 (c) waits for")


def test_a_while_is_many_times_as_long_as_a_microbatch_usually_takes() -> None:
    pace = CompletionPace()
    assert pace.patience_seconds == FIRST_SECONDS
    for _ in range(50):
        pace = pace.after(0.1)
    assert pace.patience_seconds == MIN_SECONDS
    for _ in range(50):
        pace = pace.after(3.0)
    assert pace.patience_seconds == pytest.approx(60.0, rel=0.01)
    assert pace.after(10_000.0).patience_seconds < 3 * 60.0, "a standstill is no pace"


def test_what_a_stage_misses_is_what_it_has_half_of_or_has_sent_on() -> None:
    def of(**halves: tuple[int, ...]) -> tuple[Missing, ...]:
        empty = {"fed": (), "received": (), "awaited": (), **halves}
        return missing_messages(**empty, needs_feed=True, needs_forward=True)

    assert of(awaited=(18, 17), fed=(19,)) == (Missing("gradient", 17, 2), Missing("forward", 19, 1))
    assert of(received=(20,)) == (Missing("feed", 20, 1),)
    assert of(fed=(-2, -1)) == (Missing("forward", -1, 2),)
    assert of() == (Missing("forward", ANY, 0),)
    root = missing_messages(fed=(), received=(), awaited=(), needs_feed=True, needs_forward=False)
    assert root == (Missing("feed", ANY, 0),)


whats: st.SearchStrategy[MissingKind] = st.sampled_from(["feed", "forward", "gradient"])
missing = st.builds(Missing, whats, st.integers(-5, 20), st.integers(0, 9))
stages = st.builds(
    StageNow,
    st.sampled_from("abcd"),
    st.floats(0, 20),
    st.sampled_from(["wait", "forward", "save", "average"]),
    st.integers(-1, 20),
    st.floats(0, 100),
    st.lists(missing, max_size=3).map(tuple),
)


@given(st.lists(stages, min_size=1, max_size=4), st.lists(st.integers(-5, 20), max_size=4))
def test_whatever_stages_say_there_is_a_sentence_and_only_they_are_named(
    said: list[StageNow], under_way: list[int]
) -> None:
    reason, culprits = told(*said, under_way=tuple(under_way))
    assert reason and set(culprits) <= {stage.node for stage in said}


def test_what_a_provider_reports_may_be_anything() -> None:
    report = Report(
        activity=control_pb2.Activity(
            kind="x" * 1000,
            seconds=float("nan"),
            missing=[control_pb2.Missing(what="y")] * 9 + [control_pb2.Missing(what="feed", microbatch=3)],
        ),
        transfers=[control_pb2.Transfer(kind="checkpoint", still_seconds=float("inf"), total_bytes=2**63)],
    )
    stage = stage_now("a", report, 1.0)
    assert stage.kind == "wait" and stage.seconds == 1.0 and stage.missing == ()
    assert told(stage)[0]


class Told:
    """A watch over a run whose clock and state the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.run: RunNow | None = RunNow("training", data_seconds=5.0)
        self.watch = StandstillWatch(self._emit, self.said.append, lambda: self.now)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.watch.look(lambda: self.run)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def _emit(self, kind: str, reason: str, **values: object) -> None:
        self.events.append((kind, reason))


def test_a_standstill_is_told_once_and_again_when_it_has_lasted_twice_as_long_and_so_is_its_end() -> None:
    made = Told()
    for _ in range(20):
        made.now += 0.1
        made.watch.completed()
    made.wait(9)
    assert made.events == [] and made.watch.text == ""
    made.wait(2)
    assert made.kinds() == ["standstill"] and made.watch.text.startswith("nothing completed for 11 s: the data loader")
    made.wait(8)
    assert made.kinds() == ["standstill"]
    made.wait(60)
    assert made.kinds() == ["standstill"] * 3, "at 10, 20 and 40 s"
    made.watch.completed()
    assert made.kinds()[-1] == "went_on" and made.events[-1][1] == "went on after 79 s" and made.watch.text == ""
    assert len(made.said) == 4


def test_others_that_are_to_blame_are_told_of_before_that() -> None:
    made = Told()
    made.watch.completed()
    made.watch.completed()
    made.wait(12)
    made.run = RunNow("training", (ClusterNow(0, (works("a"),), (1,)),))
    made.wait(5)
    assert made.kinds() == ["standstill"]
    made.wait(4)
    assert made.kinds() == ["standstill"] * 2 and "stage 0 (a) has been at forward" in made.events[-1][1]


def test_a_run_that_goes_on_or_is_not_watched_tells_nothing() -> None:
    made = Told()
    for _ in range(100):
        made.wait(5)
        made.watch.completed()
    made.run = None
    made.wait(300)
    assert made.events == []


def test_at_the_end_the_stages_whose_state_is_still_to_come_are_named() -> None:
    waiting = StageNow("b", missing=(Missing("forward", ANY, 0),), sends=StateSent(12_000_000, 63_000_000, 0.5))
    reason, culprits = told(waits("a", ("feed", ANY)), waiting, under_way=(), waits=("a checkpoint is being written",))
    assert reason == "stage 1 (b) sends its state, 12 MB of 63 MB; a checkpoint is being written" and culprits == ("b",)


def test_two_stages_with_two_links_count_the_frames_of_both() -> None:
    leaf = StageNow("b", missing=(Missing("forward", 17, 1),), unconfirmed=(("a", 3), ("a", 2)))
    reason, _ = told(waits("a", ("gradient", 17)), leaf)
    assert "(5 frames are not confirmed)" in reason
