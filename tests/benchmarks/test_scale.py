"""The benchmark of scale: its pieces make up its models, and its bounds count what has to be there and nothing else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import GPT, GPTSize, Recommender, ResNet50, next_token_loss
from benchmarks.scale_parts.bounds import (
    LinkUse,
    StageFigures,
    allowed_bytes,
    in_flight_bytes,
    link_ratio,
    peer_cuts,
)
from benchmarks.scale_parts.graph_figures import figures
from benchmarks.scale_parts.ours import evaluated, link_uses
from benchmarks.scale_parts.tasks import (
    Piece,
    Task,
    Tokens,
    bert_pieces,
    gpt2_pieces,
    gpt_pieces,
    recommender_pieces,
    resnet_pieces,
)
from benchmarks.scale_parts.torch_stage import stage_module
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.profile import profile
from ravnest.monitor.summary import LinkSummary, StageSummary

TINY = GPTSize(layers=2, width=16, heads=2, vocabulary=64, context=8)


def a_gpt(tied: bool) -> GPT:
    torch.manual_seed(0)
    return GPT(TINY, tied=tied)


def a_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=8, use_cache=False)
    return Tokens(transformers.GPT2LMHeadModel(config))


def a_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Tokens(transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=32)))


def a_recommender() -> nn.Module:
    return Recommender((20, 10, 5), 8)


def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))


def clicks() -> torch.Tensor:
    return torch.cat([torch.randn(4, 13), torch.randint(5, (4, 3)).float()], 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], list[Piece]], Callable[[], torch.Tensor]]] = {
    "gpt2": (a_gpt2, gpt2_pieces, tokens),
    "bert": (a_bert, bert_pieces, tokens),
    "gpt": (lambda: a_gpt(True), gpt_pieces, tokens),
    "resnet": (lambda: ResNet50(5, 4, (1, 2)), resnet_pieces, lambda: torch.randn(2, 3, 32, 32)),
    "recommender": (a_recommender, recommender_pieces, clicks),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_pieces_of_a_model_compute_what_it_computes_and_own_each_of_its_weights_once(name: str) -> None:
    build, pieces_of, inputs = MODELS[name]
    model, values = build().eval(), inputs()
    pieces = pieces_of(model)
    with torch.no_grad():
        expected = model(values)
        for piece in pieces:
            values = piece.module(values)
    torch.testing.assert_close(values, expected)
    for key, _ in model.named_parameters():
        assert sum(any(key.startswith(begin) for begin in piece.owns) for piece in pieces) == 1, key


def test_the_resnet_has_the_parameters_of_the_standard_one() -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in ResNet50().parameters()) == 25_557_032


def test_the_first_and_the_last_stage_of_a_peer_share_their_tied_weight_and_no_other_stage_has_it() -> None:
    both = ("tokens.weight", "head.weight")
    task = Task("tiny", lambda: a_gpt(True), next_token_loss, list, gpt_pieces, 2, 1, both)
    modules, shared = zip(*(stage_module(task, rank, [1, 3]) for rank in range(3)), strict=True)
    assert shared[1] is None and shared[0] is not None and shared[2] is not None
    assert torch.equal(shared[0], shared[2])
    for module, weight in zip(modules, shared, strict=True):
        assert any(parameter is weight for parameter in module.parameters()) == (weight is not None)
    values = tokens()
    expected = task.build()(values)
    for module in modules:
        values = module(values)
    torch.testing.assert_close(values, expected)


def test_a_peer_is_cut_at_the_modules_in_which_stages_begin_and_each_stage_gets_one() -> None:
    pieces = [("embed.",), *((f"layers.{number}.",) for number in range(4)), ("norm.", "head.")]
    assert peer_cuts(["layers.1.weight", "layers.3.norm.bias"], pieces) == [2, 4]
    assert peer_cuts(["layers.3.a", "layers.3.b"], pieces) == [4, 5]
    assert peer_cuts(["norm.weight", "head.weight"], pieces) == [4, 5]
    assert peer_cuts(["embed.weight"], pieces) == [1]


def test_a_stage_may_take_its_share_of_the_plain_peak_and_what_is_in_flight() -> None:
    stage = StageFigures("x", saved_bytes=100, received_bytes=10, sent_bytes=20, returned_bytes=20)
    assert in_flight_bytes(stage, flying=2, limit=3) == 2 * 100 + 3 * 30
    assert allowed_bytes(1000, 4, 50) == pytest.approx(1.3 * 250 + 50)


def test_the_use_of_a_link_is_what_both_ends_sent_over_it() -> None:
    def stage(name: str, *links: LinkSummary) -> StageSummary:
        own = {"stage": 0, "role": "stem", "device": "cpu", "parameters": 1, "updates": 1, "busy_fraction": 1.0}
        return StageSummary(provider=name, peak_memory_bytes=1, links=links, **own)  # type: ignore[arg-type]

    def link(to: str, raw: int) -> LinkSummary:
        return LinkSummary(to=to, route="direct", bytes_sent=raw // 4, bytes_raw=raw)

    stages = [stage("a", link("b", 60)), stage("b", link("a", 30), link("c", 7)), stage("c", link("b", 5))]
    assert link_uses(stages, trained=3, evaluated=2) == [LinkUse(60, 30, 5, 3), LinkUse(7, 5, 5, 3)]
    first, last = stage("a", link("b", 9), link("b", 60)), stage("b", link("a", 30), link("a", 8))
    assert link_uses([first, last], trained=3, evaluated=2) == [LinkUse(60, 30, 5, 3), LinkUse(8, 9, 5, 3)]
    crossing = StageFigures("x", saved_bytes=0, received_bytes=0, sent_bytes=10, returned_bytes=5)
    assert link_ratio(LinkUse(60, 30, 5, 3), crossing) == pytest.approx(90 / (5 * 10 + 3 * 5))


def test_the_evaluations_of_a_run_are_those_of_one_stage_in_its_trace(tmp_path: Path) -> None:
    def span(name: str, stage: int) -> dict[str, object]:
        return {"ph": "X", "name": name, "pid": 1, "tid": stage, "ts": 0, "dur": 1}

    events = [span("evaluate 1", 0), span("evaluate 2", 0), span("evaluate 1", 1), span("forward 1", 0)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "evaluate", "pid": 1, "tid": 0}]}))
    assert evaluated(path) == 2


def test_a_tied_weight_counts_with_the_rows_of_a_microbatch_and_no_more() -> None:
    hidden = 2 * 8 * TINY.width * 4
    untied, tied = (_middle(tied) for tied in (False, True))
    assert [untied[0].sent_bytes, untied[0].returned_bytes, untied[1].received_bytes] == 3 * [hidden]
    assert [tied[0].sent_bytes, tied[0].returned_bytes, tied[1].received_bytes] == 3 * [hidden]
    assert [tied[1].sent_bytes, tied[1].returned_bytes, tied[0].received_bytes] == 3 * [hidden]
    assert untied[1].sent_bytes == untied[0].received_bytes == 0
    assert (tied[0].begins, untied[0].begins) == ("positions.weight", "tokens.weight")
    assert tied[1].begins == untied[1].begins
    assert tied[0].saved_bytes == untied[0].saved_bytes > 0


def test_a_model_in_one_stage_has_no_traffic() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    captured = capture(model, F.cross_entropy, {}, _rows([4, 5]))
    costs = profile(captured.graph, captured.weights, captured.sample, 4).nodes
    [stage] = figures(captured.graph, costs, [])
    assert (stage.sent_bytes, stage.received_bytes, stage.returned_bytes) == (0, 0, 0)


def _middle(tied: bool) -> list[StageFigures]:
    """The figures of a GPT that is cut where only the hidden values cross, in the middle."""
    batches = [(tokens(), tokens()), (tokens(), tokens())]
    captured = capture(a_gpt(tied), next_token_loss, {}, batches)
    graph = captured.graph
    costs = profile(graph, captured.weights, captured.sample, 2).nodes
    weights = {parameter.name for parameter in graph.parameters}
    plan = layout(graph)
    alone = [cut for cut in plan.cuts if sum(v.name not in weights for v in plan.crossing[cut]) == 1]
    [positions] = [p.name for p in graph.parameters if p.key == "positions.weight"]
    after_tokens = [cut for cut in alone if cut > plan.first_use[positions]]
    return figures(graph, costs, [after_tokens[3]])


def _rows(sizes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(size, 4), torch.randint(3, (size,))) for size in sizes]
