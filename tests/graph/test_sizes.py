"""Free sizes: what the values of one microbatch must be, from the symbols that the coordinator's own data tells."""

import pytest
import torch

from ravnest.engine.passes.row_lookups import RowLookups
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import ValueSpec
from ravnest.graph.program import Program
from ravnest.graph.sizes import misfit, size_of, sizes_of
from tests.models import ZOO
from tests.odd_models import ODD


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("s87", 8),
        ("2*s87", 16),
        ("s87 + 1", 9),
        ("s87*s12", 24),
        ("((s87 - 1)//2) + 1", 4),
        ("Max(1, s12 - 5)", 1),
        ("s12**2", 9),
        ("Mod(s87, 3)", 2),
        ("s99", None),
        ("s99 + 1", None),
    ],
)
def test_a_size_follows_from_the_symbols(text: str, size: int | None) -> None:
    assert size_of(text, {"s87": 8, "s12": 3}) == size


@pytest.mark.parametrize(
    "text",
    [
        *(
            "__import__(s87)",
            "s87.real",
            "s87 / 2",
            "s87 // 0",
            "9**9**9",
            "(s87, s87)",
            "s87 +",
            "Max(s87)",
            "Mod(1, 0)",
        ),
        *("(" * 60 + "s87" + ")" * 60 + "+" * 5, "-" * 120 + "s87", "s87 if s87 else s87", "Max(*s87)"),
    ],
)
def test_an_expression_of_another_form_is_no_size_and_no_crash(text: str) -> None:
    assert size_of(text, {"s87": 8}) is None


def test_symbols_are_read_off_the_inputs_and_out_of_expressions() -> None:
    specs = [ValueSpec("x", torch.float32, ("s0", "2*s1 + 1")), ValueSpec("y", torch.int64, ("s0", 4))]
    assert sizes_of(specs, {"x": torch.zeros(8, 7), "y": torch.zeros(8, 4)}) == {"s0": 8, "s1": 3}
    assert sizes_of(specs, {"x": torch.zeros(8, 6)}) == {"s0": 8}, "no whole number has that"


def test_a_value_of_another_batch_is_named_with_what_it_should_be() -> None:
    specs = [ValueSpec("h", torch.float32, ("s0", 4)), ValueSpec("pairs", torch.float32, ("2*s0", "s0 + 1"))]
    good = {"h": torch.zeros(8, 4), "pairs": torch.zeros(16, 9)}
    assert misfit(specs, good, {"s0": 8}) == ""
    assert "h has the shape (7, 4), whose dimension 0 (s0) is 8" in misfit(specs, {"h": torch.zeros(7, 4)}, {"s0": 8})
    assert "(2*s0) is 16" in misfit(specs, {**good, "pairs": torch.zeros(15, 9)}, {"s0": 8})
    assert "(s0 + 1) is 9" in misfit(specs, {**good, "pairs": torch.zeros(16, 8)}, {"s0": 8})


def test_what_no_symbol_tells_is_at_least_the_same_everywhere() -> None:
    specs = [ValueSpec("h", torch.float32, ("u0", 4)), ValueSpec("k", torch.float32, ("u0", "f(u0)", "f(u0)"))]
    assert misfit(specs, {"h": torch.zeros(3, 4), "k": torch.zeros(3, 9, 9)}, {"s0": 8}) == ""
    assert misfit(specs, {"h": torch.zeros(3, 4), "k": torch.zeros(4, 9, 9)}, {"s0": 8})
    assert misfit(specs, {"h": torch.zeros(3, 4), "k": torch.zeros(3, 9, 8)}, {"s0": 8})


@pytest.mark.parametrize("name", ["gpt_tied", "Translator"])
def test_what_crosses_any_cut_has_the_size_that_its_text_says(name: str) -> None:
    """Models whose values have sizes such as `5*s26`, run stage by stage on a batch of a size they never saw."""
    kind = {**ZOO, **ODD}[name]
    torch.manual_seed(0)
    found = capture(kind.build(), kind.loss, dict(kind.metrics), [kind.batch(8), kind.batch(5)])
    values = dict(found.structure.flatten(kind.batch(7)))
    sizes = sizes_of(found.graph.inputs, values)
    texts: set[str] = set()
    stages = split(found.graph, layout(found.graph).cuts)
    lookups = RowLookups(stages[-1], torch.device("cpu")) if stages[-1].lookups else None
    if lookups is not None:
        values |= lookups.look_up(0, values, {w.name: found.weights[w.key] for w in stages[-1].weights}, train=True)
    for stage in stages:
        assert misfit(stage.from_stages, values, dict(sizes)) == ""
        texts |= {size for value in stage.receives for size in value.shape if isinstance(size, str)}
        given = {value.name: values[value.name] for value in (*stage.inputs, *stage.from_stages)}
        weights = {w.name: values[w.name] if w.name in values else found.weights[w.key] for w in stage.weights}
        with torch.no_grad():
            values |= Program(stage).run(given, weights, train=True)
    assert name != "Translator" or any("*" in text for text in texts)
    assert texts and all(size_of(text, sizes) is not None for text in texts)
