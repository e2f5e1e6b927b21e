"""The display shows what matters, never spams, and always gives the terminal back."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from ravnest import units
from ravnest.monitor import display as display_module
from ravnest.monitor.display import LiveDisplay, PlainDisplay, QuietDisplay, open_display
from ravnest.monitor.report import averaging_in_words, final_facts
from ravnest.monitor.snapshot import RunSnapshot
from ravnest.monitor.summary import AveragingSummary, ClusterSummary, StageSummary, Staleness, Summary

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_live_display(width: int = 80, height: int = 24) -> tuple[LiveDisplay, io.StringIO]:
    stream = Terminal()
    console = Console(
        file=stream,
        force_terminal=True,
        width=width,
        height=height,
        highlight=False,
        color_system=None,
        legacy_windows=False,
    )
    return LiveDisplay(console), stream


def a_stage(stage: int = 0, provider: str = "p1") -> StageSummary:
    return StageSummary(
        provider=provider,
        stage=stage,
        role="root",
        device="cpu",
        parameters=1_284_522,
        busy_fraction=0.42,
        staleness=Staleness(mean=1.9, max=3),
        peak_memory_bytes=300 << 20,
        updates=140,
    )


def a_snapshot(**changes: object) -> RunSnapshot:
    values: dict[str, object] = {
        "phase": "training",
        "title": "digits",
        "epoch": 3,
        "epochs": 10,
        "samples_done": 8912,
        "samples_total": 14370,
        "updates": 140,
        "train_loss": 0.2134,
        "eval": {"accuracy": 0.92, "loss": 0.31},
        "samples_per_second": 1245.3,
        "predicted_samples_per_second": 1310.0,
        "eta_seconds": 4.4,
        "elapsed_seconds": 12.0,
        "stages": (a_stage(0, "p1"), a_stage(1, "p2")),
    }
    return RunSnapshot(**{**values, **changes})  # type: ignore[arg-type]


def a_summary(**changes: object) -> Summary:
    values: dict[str, object] = {
        "status": "finished",
        "reason": "all epochs done",
        "samples": 14370,
        "epochs": 10,
        "seconds": 16.6,
        "samples_per_second": 1245.3,
        "predicted_samples_per_second": 1310.0,
        "train_loss": 0.05,
        "eval": {"loss": 0.04, "accuracy": 0.9835},
        "updates": 225,
        "model": "runs/x/model.safetensors",
    }
    return Summary(**{**values, **changes})  # type: ignore[arg-type]


def shown(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", stream.getvalue())


def test_the_stream_decides_on_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(open_display(True, Terminal()), LiveDisplay)
    assert isinstance(open_display(True, io.StringIO()), PlainDisplay)
    assert isinstance(open_display(False, Terminal()), QuietDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(True, Terminal()), PlainDisplay)


def test_the_live_picture_has_loss_speed_eta_and_a_line_per_stage() -> None:
    display, stream = a_live_display()
    display.show(a_snapshot())
    text = shown(stream)
    for expected in (
        "digits",
        "training",
        "epoch 3/10",
        "8,912/14,370 samples",
        "loss 0.2134",
        "1,245 samples/s",
        "planned 1,310",
        "4.4 s left",
        "evaluation loss 0.3100   accuracy 0.9200",
        "42%",
        "1.9 max 3",
        "300 MiB",
        "1.28M",
        "0 root",
        "p2",
    ):
        assert expected in text, expected
    assert all(len(line) <= 80 for line in text.splitlines())
    display.close()


def test_the_live_picture_says_why_nothing_is_completed_in_one_line_and_only_then() -> None:
    display, stream = a_live_display()
    why = "nothing completed for 30 s: stage 0 (p1) waits for the gradient of microbatch 17 from stage 1 (p2), which is"
    display.show(a_snapshot(standstill=why))
    [line] = [line for line in shown(stream).splitlines() if "nothing completed" in line]
    assert line.startswith(why[:70]) and line.rstrip().endswith("…") and len(line) <= 80
    display.close()
    display, stream = a_live_display()
    display.show(a_snapshot())
    assert "nothing completed" not in shown(stream)
    display.close()


def test_early_phases_show_without_any_numbers() -> None:
    display, stream = a_live_display()
    display.show(RunSnapshot(phase="starting providers"))
    assert "starting providers" in shown(stream) and "loss" not in shown(stream)
    display.close()


def test_more_stages_than_fit_are_counted_instead() -> None:
    display, stream = a_live_display(height=14)
    display.show(a_snapshot(stages=tuple(a_stage(number) for number in range(40))))
    assert "… and 35 more stages" in shown(stream)
    assert len(shown(stream).splitlines()) <= 14
    display.close()


def test_an_unknown_total_still_shows_progress() -> None:
    display, stream = a_live_display()
    display.show(a_snapshot(samples_total=None, eta_seconds=None))
    assert "8,912 samples" in shown(stream) and " left" not in shown(stream)
    display.close()


@pytest.mark.parametrize("ending", ["finish", "close"])
def test_the_cursor_comes_back(ending: str) -> None:
    display, stream = a_live_display()
    display.show(a_snapshot())
    assert stream.getvalue().rfind(HIDE_CURSOR) > stream.getvalue().rfind(SHOW_CURSOR)
    if ending == "finish":
        display.finish(a_summary())
    else:
        display.close()
    assert stream.getvalue().rfind(SHOW_CURSOR) > stream.getvalue().rfind(HIDE_CURSOR)
    display.close()


def test_the_cursor_comes_back_when_drawing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = a_live_display()
    display.show(a_snapshot())

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.live.Live.update", fail)
    with pytest.raises(KeyboardInterrupt):
        display.show(a_snapshot())
    assert stream.getvalue().rfind(SHOW_CURSOR) > stream.getvalue().rfind(HIDE_CURSOR)


def test_nothing_is_drawn_after_the_end() -> None:
    display, stream = a_live_display()
    display.show(a_snapshot())
    display.finish(a_summary())
    end = stream.getvalue()
    display.show(a_snapshot())
    display.message("late")
    assert stream.getvalue() == end


def test_names_from_other_machines_cannot_steer_the_terminal() -> None:
    display, stream = a_live_display()
    display.show(a_snapshot(stages=(a_stage(0, "[/bold]\x1b]0;x\x07"),)))
    display.message("reason [red]\x1b[2J")
    display.close()
    assert "[/bold]" in stream.getvalue() and "reason [red]" in stream.getvalue()
    assert "\x1b]0" not in stream.getvalue() and "\x1b[2J" not in stream.getvalue()


def test_both_displays_end_with_metrics_speed_and_the_models_path() -> None:
    live, live_stream = a_live_display()
    live.show(a_snapshot())
    live.finish(a_summary())
    plain_stream = io.StringIO()
    PlainDisplay(plain_stream).finish(a_summary())
    for text in (shown(live_stream), plain_stream.getvalue()):
        for expected in (
            "Finished in 17 s",
            "accuracy 0.9835",
            "1,245 samples/s",
            "-5%",
            "runs/x/model.safetensors",
        ):
            assert expected in text, expected


def test_a_failed_run_says_why() -> None:
    stream = io.StringIO()
    PlainDisplay(stream).finish(Summary(status="failed", reason="the loss of microbatch 7 is nan", seconds=3.0))
    assert "Failed after 3.0 s: the loss of microbatch 7 is nan" in stream.getvalue()


def test_plain_lines_never_spam(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(display_module, "monotonic", lambda: now)
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for number in range(400):
        now += 0.1
        phase = "evaluating" if number % 20 == 19 else "training"
        display.show(a_snapshot(phase=phase, eval={"loss": 1.0 / (1 + number // 100)}))
    lines = stream.getvalue().splitlines()
    assert sum("evaluation" in line for line in lines) == 4
    # 40 seconds: one line for each of the two phases and one every five seconds.
    assert 8 <= sum("evaluation" not in line for line in lines) <= 10
    assert "training   epoch 3/10   8,912/14,370 samples   loss 0.2134   1,245 samples/s" in lines[1]


def test_how_far_a_phase_is_is_shown_with_it_and_is_no_new_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(display_module, "monotonic", lambda: now)
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for number in range(101):
        now += 0.1
        display.show(RunSnapshot(phase="deploying stages", detail=f"anna {number} %"))
    lines = stream.getvalue().splitlines()
    assert len(lines) in (2, 3) and lines[0].endswith("deploying stages: anna 0 %")
    live, drawn = a_live_display()
    live.show(RunSnapshot(phase="deploying stages", detail="anna 43 %, ben 100 %"))
    assert "deploying stages: anna 43 %, ben 100 %" in shown(drawn)
    live.close()


def test_the_quiet_display_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    display = QuietDisplay()
    display.show(a_snapshot())
    display.message("hello")
    display.finish(a_summary())
    display.close()
    assert capsys.readouterr() == ("", "")


def test_the_picture_can_be_saved_for_the_documentation(tmp_path: Path) -> None:
    display, _ = a_live_display()
    display.message("hello there")
    display.show(a_snapshot())
    display.export_svg(tmp_path / "mid.svg", title="ravnest train")
    display.finish(a_summary())
    display.export_svg(tmp_path / "end.svg")
    middle, end = ((tmp_path / name).read_text().replace("&#160;", " ") for name in ("mid.svg", "end.svg"))
    assert middle.startswith("<svg") and "hello there" in middle and "8,912" in middle
    assert "Finished in 17 s" in end and "8,912" not in end
    assert "@font-face" not in middle and "url(http" not in middle


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.short_count(999), "999"),
        (units.short_count(999_600), "1M"),
        (units.short_count(73_856), "73.9k"),
        (units.byte_size(512), "512 B"),
        (units.byte_size(301 << 20), "301 MiB"),
        (units.byte_size(1023 << 20), "0.999 GiB"),
        (units.duration(8.44), "8.4 s"),
        (units.duration(83), "1:23"),
        (units.duration(7283), "2:01:23"),
        (units.metric(0.0), "0.0000"),
        (units.metric(0.000023), "2.3e-05"),
        (units.metric(float("nan")), "nan"),
        (units.sample_rate(3.14159), "3.14"),
        (units.sample_rate(1245.3), "1,245"),
    ],
)
def test_numbers_read_well(text: str, expected: str) -> None:
    assert text == expected


AVERAGED = AveragingSummary(rounds=12, rings=3, seconds_mean=0.42, bytes=35 << 20, skipped=1)


def two_clusters(**changes: object) -> RunSnapshot:
    stages = tuple(a_stage(s, f"c{c}s{s}") for c in (0, 1) for s in range(2 + c))
    first = ClusterSummary(id=0, samples=8240, samples_per_second=412.0)
    other = ClusterSummary(id=1, samples=4120, samples_per_second=206.0)
    values = {
        "stages": stages,
        "clusters": ((first, ""), (other, "")),
        "averaging": AVERAGED,
        "last_round": "round 13: 2 rings",
    }
    return a_snapshot(**{**values, **changes})


def test_stages_are_shown_cluster_by_cluster_with_what_each_cluster_does() -> None:
    display, stream = a_live_display(width=100)
    display.show(two_clusters())
    lines = [line.split() for line in shown(stream).splitlines()]
    table = [line for line in lines if line[:1] == ["cluster"] or line[1:2] == ["root"]]
    assert [line[:4] for line in table if line[0] == "cluster"] == [
        ["cluster", "0", "412", "samples/s,"],
        ["cluster", "1", "206", "samples/s,"],
    ]
    assert [line[1] if line[0] == "cluster" else line[2] for line in table] == [
        *("0", "c0s0", "c0s1"),
        *("1", "c1s0", "c1s1", "c1s2"),
    ]
    text = shown(stream)
    assert "averaging 12 rounds of 3 rings, 0.4 s each, 35 MiB sent, 1 skipped; round 13: 2 rings" in text


def test_one_cluster_is_shown_without_a_line_of_its_own() -> None:
    display, stream = a_live_display()
    display.show(a_snapshot())
    assert "cluster" not in shown(stream) and "averaging" not in shown(stream)


def test_a_cluster_that_is_lost_says_why() -> None:
    display, stream = a_live_display(width=100)
    shown_clusters = two_clusters().clusters
    display.show(two_clusters(clusters=((shown_clusters[0][0], "ann is\x1b gone"), shown_clusters[1])))
    assert "cluster 0" in shown(stream) and "lost: ann is  gone" in shown(stream)


def test_many_clusters_do_not_push_the_picture_out_of_the_terminal() -> None:
    display, stream = a_live_display(width=100, height=24)
    many = tuple((ClusterSummary(id=c, samples=0, samples_per_second=0.0), "") for c in range(50))
    display.show(two_clusters(stages=tuple(a_stage(0, f"p{c}") for c in range(50)), clusters=many))
    assert len(shown(stream).splitlines()) <= 24 and "and 49 more stages" in shown(stream)


def test_plain_lines_count_the_rounds() -> None:
    stream = io.StringIO()
    PlainDisplay(stream).show(two_clusters())
    assert "12 rounds of averaging" in stream.getvalue()


def test_averaging_in_words() -> None:
    assert averaging_in_words(AveragingSummary(rings=3)) == "no round yet"
    assert averaging_in_words(AveragingSummary(rounds=1, rings=1, seconds_mean=2.0, bytes=999)) == (
        "1 round of 1 ring, 2.0 s each, 999 B sent"
    )
    assert averaging_in_words(AveragingSummary(rings=2, skipped=4)) == "0 rounds of 2 rings, 0 B sent, 4 skipped"


def test_the_last_words_name_clusters_and_averaging_where_there_are_several() -> None:
    clusters = tuple(ClusterSummary(id=c, samples=1000 * (c + 1), samples_per_second=10.0 + c) for c in range(9))
    facts = dict(final_facts(a_summary(clusters=clusters[:2], averaging=AVERAGED)))
    assert facts["clusters"] == "1,000 samples at 10/s in 0, 2,000 samples at 11/s in 1"
    assert facts["averaging"] == "12 rounds of 3 rings, 0.4 s each, 35 MiB sent, 1 skipped"
    assert dict(final_facts(a_summary(clusters=clusters)))["clusters"] == "9, with 10 to 18 samples/s"
    assert not {"clusters", "averaging"} & dict(final_facts(a_summary(clusters=clusters[:1]))).keys()
