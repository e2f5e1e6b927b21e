"""The page about a run: a picture and a table of its stages, without scripts and without the network."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from ravnest.monitor.report_page import SHOWN_MICROBATCHES, report_page
from ravnest.monitor.summary import ClusterSummary, StageSummary, Staleness, Summary
from ravnest.monitor.trace import Trace, TraceStage
from tests.monitor.pipelines import pipeline


def a_summary(clusters: int = 1, stages: int = 2) -> Summary:
    def stage(number: int) -> StageSummary:
        return StageSummary(
            provider=f"provider-{number}",
            stage=number,
            role="root",
            device="cpu",
            parameters=10,
            peak_memory_bytes=9,
            busy_fraction=0.43,
            updates=30,
            staleness=Staleness(mean=1.25, p95=2.0, max=3),
            bytes_sent=5 << 20,
            bytes_received=3 << 20,
        )

    made = tuple(
        ClusterSummary(id=i, samples=5, samples_per_second=1.0, stages=tuple(stage(n) for n in range(stages)))
        for i in range(clusters)
    )
    return Summary(status="finished", reason="", samples=80, seconds=12.0, samples_per_second=9.0, clusters=made)


def charts(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r'<svg class="gantt".*?</svg>', page, re.DOTALL)]


def titles(chart: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in chart.iter("{http://www.w3.org/2000/svg}title")]


def test_the_page_has_the_picture_and_the_figures_of_each_stage() -> None:
    page = report_page("night", a_summary(), Trace((tuple(pipeline(2, 100)),)))
    (chart,) = charts(page)
    said = titles(chart)
    forwards = [title for title in said if title.startswith("stage 0: forward, microbatch")]
    assert SHOWN_MICROBATCHES - 2 <= len(forwards) <= SHOWN_MICROBATCHES + 2
    for what in ("stage 1: backward", "stage 0: update", "stage 0: waits (limit)", "stage 1: waits (nothing ready)"):
        assert any(title.startswith(what) for title in said), what
    for what in ("stage 0: sends forward", "stage 1: forward arrives"):
        assert any(title.startswith(what) for title in said), what
    for cell in ("80.0%", "30 ms", "40 ms", "10 ms", "20.0%", "5 MiB", "3 MiB", "1.2, at most 3"):
        assert f"<td>{cell}</td>" in page, cell
    assert "in steady state" in page


def test_it_needs_no_network_and_runs_nothing() -> None:
    page = report_page("night", a_summary(), Trace((tuple(pipeline(2, 50)),)))
    assert "<script" not in page and "javascript:" not in page
    assert not re.search(r'(src|href)="', page) and "@import" not in page and "url(http" not in page


def test_each_cluster_has_its_own_picture() -> None:
    both = (*pipeline(2, 30), *(replace(stage, cluster=1) for stage in pipeline(2, 30)))
    page = report_page("night", a_summary(clusters=2), Trace((both,)))
    assert len(charts(page)) == 2 and "<h3>Cluster 1</h3>" in page


def test_a_run_without_a_trace_says_so() -> None:
    for trace in (None, Trace(), Trace(((TraceStage(0, 0, "root", "p"),),))):
        page = report_page("night", a_summary(), trace)
        assert "This run has no trace" in page and not charts(page)
        assert "<td>43.0%</td>" in page


def test_a_resumed_run_shows_its_last_session() -> None:
    page = report_page("night", a_summary(), Trace((tuple(pipeline(2, 20)), tuple(pipeline(2, 20, first=500)))))
    (chart,) = charts(page)
    assert all(int(title.split("microbatch ")[1].split(",")[0]) >= 500 for title in titles(chart))
    assert "1 session before the run was resumed" in page


def test_what_a_stranger_called_itself_is_text_and_nothing_else() -> None:
    evil = "<script>alert(1)</script>"
    stages = tuple(replace(stage, provider=evil, role=evil) for stage in pipeline(2, 20))
    summary = a_summary()
    named = replace(summary.clusters[0].stages[0], provider=evil, role=evil)
    summary = replace(summary, clusters=(replace(summary.clusters[0], stages=(named,)),), reason=evil, status="failed")
    page = report_page(evil, summary, Trace((stages,)))
    assert "<script" not in page and page.count("&lt;script&gt;") >= 4
