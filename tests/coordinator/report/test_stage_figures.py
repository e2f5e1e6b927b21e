"""Figures of stages in the summary: the codec of each link is that of the plan."""

from dataclasses import replace

from ravnest.coordinator.report.stage_figures import stage_summary
from ravnest.net.v1.control_pb2 import LinkState, Report
from ravnest.planner.plan import StagePlan
from tests.builders import stage_plan


def staged(number: int, codec: str) -> StagePlan:
    stage = stage_plan(f"p{number}", number)
    return replace(stage, cost=replace(stage.cost, codec=codec))


def test_each_link_has_the_codec_of_the_stage_behind_it_and_the_link_of_rows_that_of_the_root() -> None:
    stages = [staged(0, "lossless"), staged(1, "bfloat16"), staged(2, "int8")]
    for number, previous, following in ((0, "lossless", "bfloat16"), (1, "bfloat16", "int8"), (2, "int8", "lossless")):
        report = Report(links=[LinkState(node="before"), LinkState(node="after", next=True)])
        links = {link.to: link.codec for link in stage_summary(stages[number], stages, report, "cpu").links}
        assert links == {"before": previous, "after": following}
