"""The formulas of docs/planning.md, as they stand there, give what the planner's code gives."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ravnest.planner.averaging import BLOCKING_SHARE, EAGER_UPDATES, MAX_SLOWDOWN, MIN_UPDATES, ROUND_SHARE
from ravnest.planner.cluster import Cluster, StageCost, cluster_of, memory_bytes
from ravnest.planner.count_costs import MAX_PLACES
from ravnest.planner.in_flight import decision as flight
from ravnest.planner.in_flight import measures as flight_measures
from ravnest.planner.in_flight.lr_bound import cautious_flight
from ravnest.planner.link_codecs import CHOICES, EXACT, FREE_SHARE, PACKED_BYTES_PER_SECOND, share_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import MAX_IN_FLIGHT, Goal, Line, Network, Provider, Requester
from ravnest.planner.recovery.worth_it import DEPLOY_SECONDS, HORIZON_SECONDS
from ravnest.planner.reliability import (
    MIN_EXPECTED_ABSENT,
    PRIOR_SECONDS,
    Attendance,
    estimate_reliability,
    expected_absent,
)
from ravnest.planner.rings import order as ring_order
from ravnest.planner.search import exhaustive, order
from ravnest.planner.shared_limits import RESULT_BYTES, totals
from ravnest.preview.dry_run import MAX_SEARCHED
from ravnest.state_budget import BUDGET_SHARE, FLOOR_SHARE
from ravnest.version_policy import POLICIES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
BLOCKS = re.findall(r"^```formula\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FORMULAS = {name: text for block in BLOCKS for name, text in re.findall(r"^(\w+) = (.+)$", block, re.MULTILINE)}

PLACES = 9
COMPUTE = {
    "stash": "compute",
    "double": "compute",
    "stash_8bit": "compute_with_stash_8bit",
    "in_place": "compute_in_place",
    "recompute": "compute_with_recompute",
    "latest": "compute_with_latest",
}
WORK = ("work", "again", "update", "update_with_stash_8bit", "update_in_place", "handling")
MEMORY = {
    "stash": "memory",
    "double": "memory_with_double",
    "stash_8bit": "memory_with_stash_8bit",
    "in_place": "memory_in_place",
    "recompute": "memory_with_recompute",
    "latest": "memory_with_latest",
}
SHARES = {"float32": 1.0, "lossless": share_of("lossless"), "bfloat16": 0.5, "float16": 0.5, "int8": 0.25390625}
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"max": max, "min": min}


def formula(name: str, **values: float) -> float:
    """What the page's formula of this name gives."""
    return _value(ast.parse(FORMULAS[name], mode="eval").body, values)


def _value(tree: ast.expr, values: Mapping[str, float]) -> float:
    match tree:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_value(argument, values) for argument in arguments))
    raise AssertionError(f"not in a formula: {ast.dump(tree)}")


def a_model(random: Random) -> ModelCosts:
    def sums(most: float) -> Any:
        return np.concatenate([[0.0], np.cumsum([random.uniform(0.1, 1) * most for _ in range(PLACES - 1)])])

    def crossing(most: float) -> Any:
        return np.array([0.0, *(random.uniform(0.1, 1) * most for _ in range(PLACES - 2)), 0.0])

    first, last = np.ones(PLACES), np.zeros(PLACES)
    first[0], last[-1] = 0, 1
    return ModelCosts(
        places=tuple(range(PLACES)),
        heavy_seconds=sums(0.02),
        light_seconds=sums(0.01),
        heavy_forward_seconds=sums(0.006),
        light_forward_seconds=sums(0.003),
        parameter_bytes=sums(1e7),
        parameters=np.arange(PLACES, dtype=float),
        saved_bytes=sums(1e7),
        unread_bytes=sums(1e5) if random.random() < 0.5 else None,
        forward_bytes=crossing(1e6),
        backward_bytes=crossing(8e5),
        input_bytes=(2e5, 300.0),
        input_uses=np.stack([first, last]),
        samples=16,
        step_seconds=random.uniform(1e-4, 1e-3),
        copy_byte_seconds=1e-9,
        code_byte_seconds=2e-9,
        stale_byte_seconds=3e-9,
        state_bytes_per_byte=random.choice((0.0, 1.0, 2.0)),
    )


def a_provider(random: Random, name: str, **more: Any) -> Provider:
    values: dict[str, Any] = {
        "memory_bytes": 1 << 40,
        "compute_speed": random.uniform(0.2, 4),
        "memory_speed": random.uniform(0.2, 4),
        "up_bytes_per_second": random.uniform(1e6, 1e7),
        "down_bytes_per_second": random.uniform(1e6, 1e7),
        "latency_seconds": random.uniform(0, 0.05),
    }
    return Provider(name=name, **(values | more))


class Case:
    """Some providers, and a cluster of them cut at random."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.model = a_model(random)
        self.goal = Goal(
            versions=list(POLICIES)[seed % len(POLICIES)],
            accumulate=random.choice((1, 3)),
            average_memory=seed // 4 % 4,
            codecs=(CHOICES, EXACT, ("float16",), ("int8",))[seed // 2 % 4],
        )
        self.order = [a_provider(random, name) for name in "abcd"[: random.randint(1, 4)]]
        measured = {}
        if len(self.order) > 1 and seed % 3 == 0:
            measured = {("a", "b"): Line(random.uniform(1e6, 1e8), 0.003), ("b", "a"): Line(3e6, 0.004)}
        self.network = Network(measured, Requester("", 1e9, 1e9))
        self.cuts = sorted(random.sample(range(1, PLACES - 1), len(self.order) - 1))
        self.in_flight = random.randint(1, 20)
        self.cluster = cluster_of(self.model, self.goal, self.network, self.order, self.cuts, self.in_flight)

    def share(self, number: int) -> float:
        """Of the bytes before this stage, what travels."""
        return SHARES[self.cluster.stages[number].codec] if 0 < number < len(self.order) else 1.0

    def values(self, number: int) -> dict[str, float]:
        """What the page's table of names says of one stage."""
        model, provider = self.model, self.order[number]
        bounds = (0, *self.cuts, model.last)
        i, j = bounds[number], bounds[number + 1]
        is_root, is_leaf = number == 0, number == len(self.order) - 1
        before = None if is_root else self.order[number - 1]
        there = Line() if before is None else self.network.line(before, provider)
        back = Line() if before is None else self.network.line(provider, before)
        fed = sum(size for size, at in zip(model.input_bytes, (0, model.last - 1), strict=True) if i <= at < j)
        sums = {
            "heavy": model.heavy_seconds,
            "light": model.light_seconds,
            "heavy_forward": model.heavy_forward_seconds,
            "light_forward": model.light_forward_seconds,
            "parameter_bytes": model.parameter_bytes,
            "saved": model.saved_bytes,
            "versioned": model.versioned_bytes(recomputes=self.goal.versions in ("recompute", "latest")),
        }
        return {
            **{name: float(table[j] - table[i]) for name, table in sums.items()},
            "compute_speed": provider.compute_speed,
            "memory_speed": provider.memory_speed,
            "step": model.step_seconds,
            "copy_byte": model.copy_byte_seconds,
            "code_byte": model.code_byte_seconds,
            "stale_byte": model.stale_byte_seconds,
            "older": 0.0 if is_leaf else 1.0,
            "forward_before": float(model.forward_bytes[i]),
            "backward_before": float(model.backward_bytes[i]),
            "forward_after": float(model.forward_bytes[j]),
            "backward_after": float(model.backward_bytes[j]),
            "share_before": self.share(number),
            "share_after": self.share(number + 1),
            "fed": fed,
            "frames": 2.0 * (not is_root) + 2.0 * (not is_leaf) + is_root + (fed > 0),
            "up_rate": provider.up_bytes_per_second,
            "down_rate": provider.down_bytes_per_second,
            "rate_there": there.bytes_per_second,
            "rate_back": back.bytes_per_second,
            "latency_there": there.latency_seconds,
            "latency_back": back.latency_seconds,
            "summed": float(self.goal.accumulate > 1),
            "state": model.state_bytes_per_byte,
            "averaging": self.goal.average_memory,
            "flying": 1.0 if is_leaf else float(self.in_flight),
            "in_flight": float(self.in_flight),
        }


@pytest.fixture(params=range(24))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


def test_what_a_stage_takes_of_its_machine_and_its_lines(case: Case) -> None:
    for number, stage in enumerate(case.cluster.stages):
        values = case.values(number)
        values |= {name: formula(name, **values) for name in WORK}
        values["compute"] = formula(COMPUTE[case.goal.versions], **values)
        assert stage.compute_seconds == close(values["compute"])
        assert stage.up_seconds == close(formula("up", **values))
        assert stage.down_seconds == close(formula("down", **values))
        assert stage.line_seconds == close(formula("line", **values))
        values |= {name: formula(name, **values) for name in ("up", "down", "line")}
        assert stage.seconds == close(formula("stage", **values))
        values["way"] = formula("way", **values)
        assert stage.trip_seconds == close(formula("trip", **values))


def test_the_memory_of_a_stage_with_every_policy(case: Case) -> None:
    tables = memory_bytes(case.model, case.goal, case.in_flight)
    bounds = (0, *case.cuts, case.model.last)
    for number, stage in enumerate(case.cluster.stages):
        values = case.values(number)
        for name in ("held", "crossing", "queued"):
            values[name] = formula(name, **values)
        expected = formula(MEMORY[case.goal.versions], **values)
        assert stage.memory_bytes == close(expected)
        assert float(tables[bounds[number], bounds[number + 1]]) == close(expected)


def test_the_rate_of_a_cluster(case: Case) -> None:
    cluster = case.cluster
    busiest = max(stage.seconds for stage in cluster.stages)
    round_trip = sum(stage.trip_seconds for stage in cluster.stages)
    evenness = 0.95 if len(cluster.stages) > 1 else 1.0
    period = formula("period", busiest=busiest, round_trip=round_trip, in_flight=case.in_flight, evenness=evenness)
    assert cluster.period_seconds == close(period)
    assert cluster.samples_per_second == close(formula("cluster_rate", samples=16, period=period))
    waits = sum(formula("wait", compute=stage.compute_seconds, busiest=busiest) for stage in cluster.stages)
    waits += 2 * sum(formula("wait_at_line", line=stage.line_seconds, busiest=busiest) for stage in cluster.stages)
    enough = formula("enough", round_trip=round_trip, waits=waits, busiest=busiest)
    assert cluster.enough_in_flight == math.ceil(enough - 1e-9)


@pytest.mark.parametrize(("stages", "accumulate", "share"), [(2, 1, 1.0), (8, 1, 0.9), (8, 1, 0.3), (3, 16, 0.7)])
def test_how_many_the_learning_rate_allows(stages: int, accumulate: int, share: float) -> None:
    allowed = formula("allowed", stages=stages, accumulate=accumulate, rate_share=share)
    assert cautious_flight(stages, accumulate, share) == math.floor(allowed)


def test_a_line_that_was_not_measured() -> None:
    random = Random(1)
    one, other = a_provider(random, "a"), a_provider(random, "b")
    line = Network().line(one, other)
    rate = formula("line_rate", up_rate=one.up_bytes_per_second, down_rate=other.down_bytes_per_second)
    assert line.bytes_per_second == rate
    latency = formula("line_latency", latency_one=one.latency_seconds, latency_other=other.latency_seconds)
    assert line.latency_seconds == latency


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("in_flight", [1, 9, 10, 32])
def test_what_a_stale_sample_is_worth(accumulate: int, in_flight: int) -> None:
    staleness = formula("staleness", in_flight=in_flight, accumulate=accumulate)
    assert Goal(accumulate=accumulate).worth(in_flight) == close(formula("worth", staleness=staleness))


@pytest.mark.parametrize("max_staleness", [0, 3, 100])
def test_how_many_may_be_in_flight(max_staleness: int) -> None:
    for accumulate in (1, 4):
        goal = Goal(max_staleness=max_staleness, accumulate=accumulate)
        expected = formula("max_in_flight", max_staleness=max_staleness, accumulate=accumulate)
        assert goal.max_in_flight == expected
    assert Goal(in_flight=5).max_in_flight == 5
    assert Goal(versions="double", accumulate=3).max_in_flight == 3
    assert Goal(versions="double", accumulate=3, max_staleness=0).bound_in_flight == 1
    assert Goal(versions="latest", accumulate=3).bound_in_flight is None


def _two_clusters(requester: Requester, **more: Any) -> tuple[Goal, Network, dict[str, Provider], list[Cluster]]:
    random = Random(7)
    model, goal, network = a_model(random), Goal(average_every=50), Network({}, requester)
    members = {name: a_provider(random, name, **more) for name in "abcd"}
    pairs = ([members["a"], members["b"]], [members["c"], members["d"]])
    return goal, network, members, [cluster_of(model, goal, network, pair, [4], 12) for pair in pairs]


@pytest.mark.parametrize("every", [2, 50, 10**6])
@pytest.mark.parametrize("blocking", [False, True])
def test_clusters_that_share_nothing_lose_only_what_averaging_takes(every: int, blocking: bool) -> None:
    goal, network, members, clusters = _two_clusters(Requester())
    goal = replace(goal, average_every=every, blocking=blocking, average_share=0.27)
    found = totals(goal, network, members, clusters)

    def averaged(stage: StageCost) -> float:
        provider = members[stage.provider]
        line = {"up_rate": provider.up_bytes_per_second, "down_rate": provider.down_bytes_per_second}
        return formula("averaged", clusters=2, share=0.27, parameter_bytes=stage.parameter_bytes, **line)

    together = sum(cluster.samples_per_second for cluster in clusters)
    slowest = max(averaged(stage) for cluster in clusters for stage in cluster.stages)
    seconds = formula("round", slowest=slowest)
    between = formula("between", average_every=every, clusters=2, samples=16, together=together)
    assert found.averaging_seconds == close(seconds)
    expected = 0.0
    for cluster in clusters:
        rate = cluster.samples_per_second
        loads = [
            formula(
                "line_load",
                microbatches=rate / 16,
                up=stage.up_seconds,
                down=stage.down_seconds,
                averaged=averaged(stage),
                between=between,
            )
            for stage in cluster.stages
        ]
        expected += formula("rate_with_rounds", rate=rate, line_load=max(loads))
    assert (expected < 0.9 * together) is (every == 2)
    if blocking:
        expected = formula("waiting_for_rounds", together=together, between=between, round=seconds)
    assert found.samples_per_second == close(expected)
    worth = sum(cluster.samples_per_second * goal.worth(cluster.needed_in_flight) for cluster in clusters)
    assert found.score == close(formula("waiting_for_rounds", together=worth, between=between, round=seconds))


def test_the_requester_s_line_holds_all_clusters_back_alike() -> None:
    requester = Requester("", 2e6, 1e6)
    goal, network, members, clusters = _two_clusters(requester, reachable=False)
    microbatches = [cluster.samples_per_second / cluster.samples for cluster in clusters]
    fed, relayed = (
        sum(rate * sum(getattr(s, what) for s in c.stages) for rate, c in zip(microbatches, clusters, strict=True))
        for what in ("fed_bytes", "relayed_bytes")
    )
    results = sum(2 * RESULT_BYTES * rate for rate in microbatches)
    load = formula(
        "requester_load",
        fed_rate=fed,
        relayed_rate=relayed,
        result_rate=results,
        requester_up=2e6,
        requester_down=1e6,
    )
    assert load > 1
    share = formula("requester_share", requester_load=load)
    found = totals(goal, network, members, clusters)
    assert list(found.rates) == [close(cluster.samples_per_second * share) for cluster in clusters]
    assert found.limit.startswith("the requester's downlink: ")


def test_providers_on_one_host_share_its_cores() -> None:
    goal, network, members, clusters = _two_clusters(Requester(), host="tower", cores=2, threads=2)
    busy = sum(
        2 * sum(stage.compute_seconds for stage in cluster.stages) / cluster.period_seconds for cluster in clusters
    )
    share = formula("host_share", cores=2, busy=busy)
    assert share < 1
    found = totals(goal, network, members, clusters)
    assert list(found.rates) == [close(cluster.samples_per_second * share) for cluster in clusters]


NUMBERS = [
    ("busy for more than {} of `slowest`", FREE_SHARE),
    ("1 for float32, about {:.2f} for lossless", share_of("lossless")),
    ("0.5 for bfloat16 and float16, {:.3f} for int8", share_of("int8")),
    ("on lines of at most {:.0f} Mbit/s", PACKED_BYTES_PER_SECOND / 125_000),
    ("all orders of up to {} machines", order.EXACT),
    ("For up to {} machines every set", exhaustive.MOST),
    ("exactly for up to {} owners", ring_order.EXACT),
    ("more than {} places are reduced", MAX_PLACES),
    ("and never more than {}, nor than", MAX_IN_FLIGHT),
    ("For up to {} machines those questions", MAX_SEARCHED),
    ("within the next {:.0f} seconds", HORIZON_SECONDS),
    ("every cluster has made {} updates", MIN_UPDATES),
    ("Less than {} of a machine", MIN_EXPECTED_ABSENT),
    ("starts with a credit of {:.0f} hours", PRIOR_SECONDS / 3600),
    ("at least {} times as long as a reduce", ROUND_SHARE),
    ("({} times with `averaging.blocking`", BLOCKING_SHARE),
    ("until every cluster has made {} updates", EAGER_UPDATES),
    ("at most {:.0f} % of any line", 100 * BUDGET_SHARE),
    ("at least {:.0f} % of the line", 100 * FLOOR_SHARE),
    ("at most {:.0f} % of any machine's time", 100 * MAX_SLOWDOWN),
    ("takes `average_every` to be {}.", Goal().average_every),
    ("stands still for {:.0f} seconds", DEPLOY_SECONDS),
    ("works less than {:.1f} % of the time", 100 * flight_measures.IDLE),
    ("has been so for {:.0f} seconds", flight.PATIENCE_SECONDS),
    ("not tried again for {:.0f} seconds", flight.AGAIN_SECONDS),
    ("fewer that cost more than {:.1f} % of the rate", 100 * flight.COST),
]


@pytest.mark.parametrize(("sentence", "number"), NUMBERS)
def test_the_bounds_on_the_page_are_the_code_s(sentence: str, number: float) -> None:
    assert sentence.format(number) in " ".join(PAGE.split())


def test_as_many_stand_by_as_will_be_missing_on_average() -> None:
    reliabilities = (0.9, 0.8, 0.75, 0.99)
    assert expected_absent(reliabilities) == math.ceil(sum(1 - r for r in reliabilities))


@pytest.mark.parametrize("seen", [Attendance(3, 5000.0, 2, 1, 4), Attendance(1, 90_000.0, losses=1), Attendance()])
def test_how_reliable_a_machine_is(seen: Attendance) -> None:
    missing = formula("missing", losses=seen.losses, departures=seen.departures, interruptions=seen.interruptions)
    reliability = formula("reliability", connected=seen.connected_seconds, missing=missing)
    assert estimate_reliability(seen).value == round(reliability, 2)


def test_every_formula_of_the_page_is_tested() -> None:
    named = re.findall(r'"(\w+)"', Path(__file__).read_text())
    assert len(FORMULAS) > 20
    assert set(FORMULAS) <= set(named), set(FORMULAS) - set(named)
