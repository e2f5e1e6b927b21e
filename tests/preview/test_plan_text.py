"""A plan as a person sees it: true at any width, with any names, and short however many machines there are."""

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from ravnest import units
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.preview.as_text import SHOWN_ROWS, limit_word, print_plan
from ravnest.preview.diagram import PLAIN, picture, rate
from ravnest.preview.dry_run import DryRun
from tests.preview.planned import dry_run_of, fast_line, machines

THREE = dry_run_of([machines("anna", "ben", "carla")], machines("dora"), Network(fast_line()))
LONG = dry_run_of([machines(*(f"machine-number-{i:02}" for i in range(9)))])
HUGE = dry_run_of([machines(*(f"{i}-{k}" for k in range(3))) for i in range(400)], machines(*map(str, range(50))))
ODD = dry_run_of([machines("[red]x[/red]", "日本語の長い名前のコンピュータです", "a" * 60)])


def shown(dry: DryRun, width: int) -> str:
    written = io.StringIO()
    print_plan(dry, Console(file=written, width=width, highlight=False))
    return written.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("dry", [THREE, LONG, HUGE, ODD], ids=["three", "long", "huge", "odd"])
def test_no_line_is_wider_than_the_terminal(dry: DryRun, width: int) -> None:
    assert max(cell_len(line) for line in shown(dry, width).splitlines()) <= width


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("dry", [THREE, LONG, ODD], ids=["three", "long", "odd"])
def test_boxes_are_closed_and_stand_under_one_another(dry: DryRun, width: int) -> None:
    lines = picture(dry, 0, width).splitlines()
    assert len(lines) % 5 == 0
    for top, *inner, bottom in zip(*[iter(lines)] * 5, strict=True):
        corners = [(m.start(), m.end()) for m in re.finditer("┌─+┐", top)]
        assert corners and corners == [(m.start(), m.end()) for m in re.finditer("└─+┘", bottom)]
        for line in inner:
            edges = [_cell(line, i) for i, character in enumerate(line) if character == "│"]
            assert edges == [cell for start, end in corners for cell in (start, end - 1)]


def _cell(line: str, index: int) -> int:
    return cell_len(line[:index])


def test_where_fewer_are_in_flight_at_first_the_rate_of_the_whole_run_is_shown_too() -> None:
    assert "over the whole run" not in shown(THREE, 120)
    slowed = shown(replace(THREE, plan=replace(THREE.plan, slowed=0.5)), 120).splitlines()
    half = units.sample_rate(THREE.plan.predicted_samples_per_second / 2)
    assert any(
        line.startswith(f"{half} samples/s over the whole run: fewer microbatches are in flight") for line in slowed
    )


def test_a_link_shows_what_it_carries_each_way_and_its_round_trip() -> None:
    cluster = THREE.clusters[0]
    work = [
        f"{stage.compute_seconds * 1000:.3g} ms · {100 * stage.compute_seconds / cluster.period_seconds:.0f} %".ljust(
            14
        )
        for stage in cluster.stages
    ]
    assert picture(THREE, 0, 80).splitlines() == [
        "┌────────────────┐  1 Gbit/s  ┌────────────────┐ 40 Mbit/s  ┌────────────────┐",
        "│ anna           │───────────▶│ ben            │───────────▶│ carla          │",
        "│ root · 20M     │    1 ms    │ stem · 20M     │   48 ms    │ leaf · 20M     │",
        f"│ {work[0]} │◀───────────│ {work[1]} │◀───────────│ {work[2]} │",
        "└────────────────┘  1 Gbit/s  └────────────────┘ 40 Mbit/s  └────────────────┘",
    ]


def test_a_link_through_the_requester_and_one_within_a_host_are_told() -> None:
    outbound = [Provider(name=n, memory_bytes=8 << 30, reachable=False, latency_seconds=0.01) for n in "ab"]
    assert "relay 60 ms" in picture(dry_run_of([outbound]), 0, 80)
    together = [Provider(name=n, memory_bytes=8 << 30, host="tower", cores=8) for n in "ab"]
    assert "no limit" in picture(dry_run_of([together]), 0, 80)


def test_the_table_has_a_row_for_each_stage_with_what_it_needs() -> None:
    text = shown(THREE, 100)
    assert re.search(r"^root anna +blocks\.0 to \.19 +20M +[\d.]+[MG]/8G +\d+ +\d+ +\w+ *$", text, re.MULTILINE)
    assert re.search(r"^stem ben +blocks\.20 to \.39 +20M ", text, re.MULTILINE)
    assert re.search(r"^leaf carla +blocks\.40 to \.59 +20M ", text, re.MULTILINE)


def test_the_promise_comes_first_and_who_stands_by_is_named() -> None:
    text = shown(THREE, 100)
    rate_shown = f"{THREE.plan.predicted_samples_per_second:.3g} samples/s predicted with 1 cluster of 3 stages"
    assert text.splitlines()[0] == f"made-up: {rate_shown}, of 4 machines"
    assert "standbys: dora" in text
    assert "state: a lost machine costs at most " in text and "a checkpoint every " in text
    assert "5 microbatches in flight, staleness up to 4" in text
    assert f"limited by {THREE.clusters[0].limit}" in text.replace("\n", " ")


def test_a_thousand_machines_fit_on_a_few_screens() -> None:
    text = shown(HUGE, 100)
    assert len(text.splitlines()) < 250
    assert re.search(r"… and 39\d clusters more, of 3 stages", text)
    assert "and 38 more" in text
    assert "averaging: " in text


def test_the_reasons_come_last_without_what_the_tables_have_said() -> None:
    clusters = [machines("anna", "ben"), machines("carla", "emil")]
    dry = dry_run_of(clusters, machines(*(f"waiting-{i}" for i in range(9))), explained=True)
    assert dry.explanation is not None
    text = " ".join(shown(dry, 80).split())
    assert "- 2 clusters for " in text
    assert not any(sentence in text for sentence in dry.explanation.clusters)
    assert "- waiting-0 stands by" in text and "more stand by." in text
    assert "With one more machine like" in text or "No more with" in text


def test_rings_name_their_owners_in_order() -> None:
    two = dry_run_of([machines("anna", "ben"), machines("carla", "dora")])
    text = shown(two, 120)
    assert "in 2 rings" in text
    assert "blocks.0 to .29: anna > carla, slowest line 40 Mbit/s" in text
    assert "blocks.30 to .59: ben > dora, slowest line 40 Mbit/s" in text


def test_machines_that_hold_the_whole_model_are_one_table() -> None:
    dry = dry_run_of([machines(name) for name in ("anna", "ben", "carla")], in_flight=1)
    text = shown(dry, 80)
    assert "┌" not in text
    assert re.search(r"^ +1 anna +[\d.,]+ +[\d.]+[MG]/8G ", text, re.MULTILINE)
    assert text.startswith("made-up: ") and "3 clusters of 1 stage" in text


def test_a_cluster_of_many_stages_is_shown_by_its_ends() -> None:
    names = [f"pc-{i:02}" for i in range(50)]
    dry = dry_run_of([machines(*names)])
    text = shown(dry, 100)
    assert text.count("stem") < 2 * SHOWN_ROWS
    assert "… 26 more …" in picture(dry, 0, 80)
    for name in (names[0], names[1], names[-2], names[-1]):
        assert text.count(name) >= 2, name


def test_names_cannot_steer_the_terminal_or_the_markup() -> None:
    text = shown(ODD, 100)
    assert "[red]x[/red]" in text
    steering = dry_run_of([machines("a\x1b[2Jb", "c")])
    assert "\x1b" not in shown(steering, 100)


def test_ascii_is_enough_to_show_it() -> None:
    text = shown(THREE, 80).translate(PLAIN)
    assert text.isascii()
    assert "+----------------+" in text and "----------->" in text


@pytest.mark.parametrize(
    ("bytes_per_second", "told"),
    [(float("inf"), "no limit"), (3e5, "2.4 Mbit/s"), (5e6, "40 Mbit/s"), (125e6, "1 Gbit/s"), (3.125e8, "2.5 Gbit/s")],
)
def test_rates_are_told_as_people_say_them(bytes_per_second: float, told: str) -> None:
    assert rate(bytes_per_second) == told


def test_the_limit_of_a_stage_in_a_word_is_the_one_in_its_sentence() -> None:
    words = {"compute": "computation", "upload": "send", "download": "receive", "link": "line between"}
    for dry in (THREE, LONG, HUGE):
        for cluster in dry.clusters:
            for stage in cluster.stages:
                assert words[limit_word(stage)] in stage.limit


@pytest.mark.parametrize("count", [2, 3])
def test_the_link_of_looked_up_rows_is_shown_with_its_codec(count: int) -> None:
    order = machines("anna", "ben", "carla")[:count]
    goal = Goal(codecs=("int8",))
    tied = dry_run_of([order], goal=goal, rows_bytes=1e6)
    text = " ".join(shown(tied, 120).split())
    assert f"{order[-1].name} to anna (looked-up rows) in int8" in text
    assert "(looked-up rows)" not in shown(dry_run_of([order], goal=goal), 120)
    there = tied.line_before(tied.clusters[0], 0)
    assert there is not None and there[0] == tied.network.line(order[-1], order[0])
