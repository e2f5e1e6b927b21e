"""Of a cluster that stands still though all its stages report, the one that holds the others up is named."""

from collections.abc import Callable

import pytest

from ravnest.coordinator.health.lease import Replacement
from ravnest.coordinator.health.stalls import LinkView, StageView, find_cause, judge_stall, longest_after


def cluster(
    still: float = 30.0,
    ready: tuple[int, ...] = (0, 0, 0),
    down: tuple[tuple[int, int], ...] = (),
    stuck: tuple[tuple[int, int], ...] = (),
) -> list[StageView]:
    """Three stages a, b, c; `down` and `stuck` are links as the first of the two sees them."""
    names = "abc"
    return [
        StageView(
            names[stage],
            still + 0.1 * stage,
            ready[stage],
            tuple(
                LinkView(names[other], (stage, other) not in down, 3 if (stage, other) in stuck else 0)
                for other in (stage - 1, stage + 1)
                if 0 <= other < 3
            ),
        )
        for stage in range(3)
    ]


def always(replacement: Replacement) -> Callable[[str], Replacement]:
    return lambda node_id: replacement


def test_a_stage_that_has_work_and_does_none_of_it_is_to_blame() -> None:
    cause = find_cause(cluster(ready=(0, 4, 0)))
    assert cause.nodes == ("b",) and "b has had 4 tasks to do for 30 s" in cause.reason


def test_of_several_that_are_at_work_the_one_that_began_first_is_to_blame() -> None:
    stages = [StageView("a", 12.0, 1), StageView("b", 30.0, 2), StageView("c", 11.0, 1)]
    assert find_cause(stages).nodes == ("b",)


def test_a_stage_whose_links_are_both_down_is_to_blame_whoever_says_so() -> None:
    for down in ([(0, 1), (2, 1)], [(1, 0), (1, 2)], [(0, 1), (1, 0), (1, 2), (2, 1)]):
        assert find_cause(cluster(down=tuple(down))).nodes == ("b",)


def test_of_a_link_that_is_down_both_ends_may_be_to_blame() -> None:
    cause = find_cause(cluster(down=((1, 2),)))
    assert cause.nodes == ("b", "c") and cause.reason == "there is no connection between b and c" and cause.heals


def test_a_link_is_to_blame_before_a_stage_that_waits_for_it() -> None:
    assert find_cause(cluster(ready=(1, 0, 0), down=((1, 2),))).nodes == ("b", "c")


def test_a_link_over_which_nothing_passes_is_to_blame_though_it_is_connected() -> None:
    cause = find_cause(cluster(stuck=((0, 1),)))
    assert cause.nodes == ("a", "b") and cause.reason == "nothing passes between a and b"


def test_a_slow_line_gets_more_time_and_no_line_is_so_slow_that_it_gets_any_time() -> None:
    for seconds, still, is_over in (
        (40.0, 60.0, False),
        (40.0, 130.0, True),
        (1e15, 200.0, False),
        (1e15, 400.0, True),
    ):
        link = LinkView("b", connected=True, unconfirmed=1, line_seconds=seconds)
        stages = [StageView("a", still, 0, (link,)), StageView("b", still)]
        stall = judge_stall(stages, 1.0, always("reform"))
        assert (stall is not None and stall.is_over) == is_over, (seconds, still)


def test_where_nobody_has_anything_to_do_nobody_is_to_blame() -> None:
    assert find_cause(cluster()).nodes == ()
    assert judge_stall(cluster(), 1.0, always("standby")) is None


def test_what_a_stage_says_of_strangers_blames_nobody() -> None:
    assert find_cause([StageView("a", 30.0, 0, (LinkView("z", False), LinkView("a", False)))]).nodes == ()


@pytest.mark.parametrize(("still", "verdict"), [(4.0, None), (6.0, False), (11.0, True)])
def test_a_cluster_that_stands_still_is_suspected_and_then_its_stage_is_given_up(
    still: float, verdict: bool | None
) -> None:
    stall = judge_stall(cluster(still, ready=(0, 1, 0)), 1.0, always("standby"))
    assert (None if stall is None else stall.is_over) is verdict
    if stall is not None:
        assert stall.node_id == "b" and "a standby is ready" in stall.reason


def test_a_cluster_whose_work_takes_long_is_waited_for() -> None:
    slow = cluster(30.0, ready=(0, 1, 0))
    assert judge_stall(slow, 20.0, always("standby")) is None
    stall = judge_stall(cluster(81.0, ready=(0, 1, 0)), 20.0, always("standby"))
    assert stall is not None and stall.is_over


def test_a_link_has_time_to_find_another_way() -> None:
    stall = judge_stall(cluster(12.0, down=((0, 1),)), 1.0, always("standby"))
    assert stall is not None and not stall.is_over
    stall = judge_stall(cluster(16.0, down=((0, 1),)), 1.0, always("standby"))
    assert stall is not None and stall.is_over


def test_of_two_ends_the_one_that_is_replaced_most_easily_is_given_up() -> None:
    stages = cluster(40.0, down=((0, 1),))
    for easily, other in (("a", "b"), ("b", "a")):
        replacements: dict[str, Replacement] = {easily: "standby", other: "reform"}
        stall = judge_stall(stages, 1.0, replacements.__getitem__)
        assert stall is not None and stall.node_id == easily and stall.is_over


def test_nobody_is_given_up_whose_place_nobody_can_take() -> None:
    assert judge_stall(cluster(1000.0, ready=(0, 1, 0)), 1.0, always("none")) is None


def test_one_stage_that_moves_is_a_cluster_that_moves() -> None:
    stages = [StageView("a", 100.0, 1), StageView("b", 0.5, 1)]
    assert judge_stall(stages, 1.0, always("standby")) is None


def test_a_long_pause_is_forgotten_in_time() -> None:
    longest = longest_after(1.0, 20.0)
    assert longest == 20.0
    for _ in range(100):
        longest = longest_after(longest, 0.5)
    assert longest < 1.0


def test_a_frame_that_a_slow_line_carries_for_a_minute_is_no_fault_and_one_that_never_arrives_is() -> None:
    """8 MB of activations take 64 s at 1 Mbit/s."""
    frame = LinkView("b", True, 1, 8e6 / (1e6 / 8))
    for still, is_over in ((70.0, False), (120.0, False), (200.0, True)):
        stages = [StageView("a", still, links=(frame,)), StageView("b", still)]
        stall = judge_stall(stages, 5.0, always("reform"))
        assert (stall is not None and stall.is_over) == is_over, still
