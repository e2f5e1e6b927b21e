"""Random and constant weights are found where they are drawn, and made again bit for bit from plain data."""

import json

import pytest
import torch
from torch import nn

from ravnest.errors import GraphError
from ravnest.graph.initial_weights.find_initial import InitialWeight, find_initial, sha256_of
from ravnest.graph.initial_weights.generator_position import POSITION_BYTES, generator_at, position_of
from ravnest.graph.initial_weights.recipe import Recipe
from ravnest.graph.initial_weights.recorder import DrawRecorder, draws_of
from ravnest.graph.initial_weights.sources_text import read_sources, sources_text
from ravnest.graph.weights import stream_header, stream_size_bytes

NO_RECIPE = ("position", "changed", "small", "linear.bias", "xavier.bias", "conv.bias")
"""Made by a function that returns a new tensor, changed after the draw, or too small."""


class Net(nn.Module):
    """Layers with the usual initialisations, and a weight that no recipe makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 96)
        self.conv = nn.Conv2d(16, 32, 5)
        self.norm = nn.LayerNorm(4096)
        self.embedding = nn.Embedding(300, 48, padding_idx=3)
        self.xavier = nn.Linear(80, 80)
        nn.init.xavier_normal_(self.xavier.weight)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(70, 70), std=0.02))
        self.coarse = nn.Parameter(torch.empty(100, 90, dtype=torch.bfloat16).normal_(0, 0.1))
        self.position = nn.Parameter(torch.randn(50, 60))
        self.changed = nn.Parameter(torch.randn(50, 60) * 0.02)
        self.small = nn.Parameter(torch.randn(10))


def found(seed: int = 0) -> tuple[Net, dict[str, InitialWeight]]:
    with DrawRecorder() as recorder:
        torch.manual_seed(seed)
        model = Net()
    recorder.keep_for(model)
    return model, find_initial(dict(model.named_parameters()), draws_of(model))


def test_every_usual_initialisation_is_found_and_made_again_bit_for_bit() -> None:
    model, initial = found()
    torch.manual_seed(12345)
    before = torch.get_rng_state()
    for name, weight in model.named_parameters():
        recipe = initial[name].recipe
        assert (recipe is None) == (name in NO_RECIPE), name
        if recipe is not None:
            told = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
            made = told.make(tuple(weight.shape), weight.dtype)
            assert torch.equal(made.view(torch.uint8), weight.detach().view(torch.uint8)), name
            assert sha256_of(made) == initial[name].sha256
            assert len(json.dumps(recipe.to_json())) < weight.nbytes
    assert torch.equal(before, torch.get_rng_state())
    rows = initial["embedding.weight"].recipe
    assert rows is not None and rows.zero_rows == (3,)


def test_the_recorder_changes_no_value_and_leaves_torch_as_it_was() -> None:
    torch.manual_seed(0)
    plain = Net()
    originals = torch.Tensor.normal_, torch.Tensor.uniform_, torch.nn.init._no_grad_trunc_normal_
    model, _ = found()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert (torch.Tensor.normal_, torch.Tensor.uniform_, torch.nn.init._no_grad_trunc_normal_) == originals


def test_scripts_and_forks_of_random_numbers_work_while_draws_are_noted() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3) + torch.empty(3).normal_(0.0, 1.0)

    with DrawRecorder() as recorder:
        script = torch.jit.script(noisy)
        assert script(torch.zeros(3)).shape == (3,)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = nn.Linear(100, 100)
        torch.func.vmap(lambda x: x.clone().uniform_(), randomness="different")(torch.zeros(2, 3000))
    recorder.keep_for(model)
    assert find_initial({"weight": model.weight}, draws_of(model))["weight"].recipe is not None


def test_a_weight_that_changed_after_its_draw_has_no_recipe() -> None:
    with DrawRecorder() as recorder:
        model = nn.Linear(100, 100)
        with torch.no_grad():
            model.weight[5, 7] += 1
    recorder.keep_for(model)
    assert find_initial(dict(model.named_parameters()), draws_of(model))["weight"].recipe is None


def test_a_model_made_without_a_recorder_has_hashes_alone() -> None:
    model = nn.Linear(100, 100)
    initial = find_initial(dict(model.named_parameters()), draws_of(model))
    assert initial["weight"] == InitialWeight(sha256_of(model.weight))


def test_a_generator_of_the_user_s_own_is_followed() -> None:
    model = nn.Linear(100, 100, bias=False)
    with DrawRecorder() as recorder:
        nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(7))
    recorder.keep_for(model)
    assert find_initial({"weight": model.weight}, draws_of(model))["weight"].recipe is not None


def test_meta_tensors_are_left_alone() -> None:
    with DrawRecorder() as recorder, torch.device("meta"):
        model = nn.Linear(1000, 1000)
    recorder.keep_for(model)
    assert not draws_of(model)


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 5000])
def test_a_generator_continues_where_it_was(drawn: int) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(drawn, generator=generator)
    position = position_of(generator)
    again = generator_at(position)
    assert len(position) == POSITION_BYTES
    assert torch.equal(torch.randn(1000, generator=again), torch.randn(1000, generator=generator))


POSITION = position_of(torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "position",
    [b"", POSITION[:-1], (624).to_bytes(2, "little") * 2 + POSITION[4:], bytes(4) + POSITION[4:]],
)
def test_a_position_outside_of_the_words_is_refused(position: bytes) -> None:
    with pytest.raises(GraphError, match="position of a generator"):
        generator_at(position)


GOOD = Recipe("normal", (0.0, 1.0), POSITION).to_json()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "does not consist"),
        ({**GOOD, "more": 1}, "does not consist"),
        ({**GOOD, "draw": "system"}, "a recipe draws 'system'"),
        ({**GOOD, "draw": ["normal"]}, "a recipe draws"),
        ({**GOOD, "arguments": [0.0]}, "2 numbers"),
        ({**GOOD, "arguments": [0.0, True]}, "2 numbers"),
        ({**GOOD, "arguments": [0.0, 1e300]}, "2 numbers"),
        ({**GOOD, "data": "?"}, "base64"),
        ({**GOOD, "data": ""}, "position of a generator"),
        ({**GOOD, "zero_rows": [-1]}, "zero_rows"),
        ({**GOOD, "zero_rows": list(range(17))}, "zero_rows"),
    ],
)
def test_an_invalid_recipe_is_refused(value: object, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        Recipe.from_json(value)


class OtherGenerator:
    """The generator of a PyTorch that keeps its position in another form."""

    def manual_seed(self, seed: int) -> None:
        pass

    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)


def test_a_torch_with_another_generator_reads_a_draw_and_cannot_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", OtherGenerator)
    recipe = Recipe.from_json(GOOD)
    with pytest.raises(GraphError, match="the state of PyTorch's generator has 16 bytes"):
        recipe.make((4, 5), torch.float32)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (Recipe("normal", (0.0, -1.0), POSITION), torch.float32),
        (Recipe("normal", (0.0, 1.0), POSITION), torch.int64),
        (Recipe("uniform", (1.0, 0.0), POSITION), torch.float32),
        (Recipe("truncated_normal", (0.0, 1.0, 40.0, 50.0), POSITION), torch.float32),
        (Recipe("truncated_normal", (0.0, 0.0, -1.0, 1.0), POSITION), torch.float32),
        (Recipe("normal", (0.0, 1.0), POSITION, (100,)), torch.float32),
        (Recipe("constant", data=bytes(3)), torch.float32),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_and_never_hangs(recipe: Recipe, dtype: torch.dtype) -> None:
    with pytest.raises(GraphError):
        recipe.make((4, 5), dtype)


@pytest.mark.parametrize("recipe", [Recipe("normal", (0.0, 1.0), POSITION), Recipe("constant", data=bytes(4))])
def test_a_tensor_for_which_there_is_no_memory_is_an_error_of_its_recipe(recipe: Recipe) -> None:
    with pytest.raises(GraphError):
        recipe.make((1 << 58,), torch.float32)


def test_the_list_of_a_stream_comes_back_and_a_false_one_is_refused() -> None:
    model, initial = found()
    tensors = {f"weight:{name}": weight.detach() for name, weight in model.named_parameters()}
    named = {f"weight:{name}": known for name, known in initial.items()}
    header, size_bytes = stream_header(tensors), stream_size_bytes(tensors)
    text = sources_text(header, named)
    listed = read_sources(text, size_bytes)
    assert listed.header == header
    assert {tensor.entry.name: tensor.recipe for tensor in listed.tensors} == {
        name: known.recipe for name, known in named.items()
    }
    del named["weight:small"]
    for wrong, size in [(text, size_bytes + 1), (text[:-1], size_bytes), (sources_text(header, named), size_bytes)]:
        with pytest.raises(GraphError):
            read_sources(wrong, size)
