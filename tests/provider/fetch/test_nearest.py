"""First weights from the nearest source: drawn here, from files here, and only the rest over the network."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ravnest.errors import PeerError, RefusedError
from ravnest.graph.initial_weights.find_initial import InitialWeight, find_initial
from ravnest.graph.initial_weights.recipe import Recipe
from ravnest.graph.initial_weights.recorder import DrawRecorder, draws_of
from ravnest.graph.initial_weights.sources_text import WeightSources, read_sources, sources_text
from ravnest.graph.weights import WeightsReader, stream_header, stream_tensors
from ravnest.net.v1.control_pb2 import ArtifactRef
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.cache import ArtifactCache
from ravnest.provider.fetch.local_weights import LocalWeights, huggingface_folder, searched_text
from ravnest.provider.fetch.progress import FetchProgress


class Coordinator:
    """Serves one stream, and notes which of its bytes it has sent."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []

    async def fetch(self, artifact: str, offset: int = 0, end: int = 0) -> AsyncGenerator[bytes, None]:
        end = end or len(self.content)
        self.asked.append((offset, end))
        for start in range(offset, end, 1000):
            yield self.content[start : min(end, start + 1000)]

    @property
    def sent_bytes(self) -> int:
        return sum(end - begin for begin, end in self.asked)


class Stage:
    """The first weights of a model, as a coordinator offers them."""

    def __init__(self) -> None:
        with DrawRecorder() as recorder:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(100, 90), nn.LayerNorm(3000), nn.Linear(90, 70), nn.Linear(70, 60))
        with torch.no_grad():
            # The third layer comes from somewhere else, and the last one changes after its draw.
            model[2].weight.copy_(torch.arange(6300.0).view(70, 90))
            model[3].weight.mul_(2)
        recorder.keep_for(model)
        self.weights = {name: weight.detach() for name, weight in model.named_parameters()}
        self.initial = find_initial(self.weights, draws_of(model))
        tensors = {f"weight:{name}": weight for name, weight in self.weights.items()}
        self.content = b"".join(stream_tensors(tensors))
        self.header = stream_header(tensors)
        self.listings = 0
        self.ref = ArtifactRef(
            id="weights", sha256=hashlib.sha256(self.content).hexdigest(), size_bytes=len(self.content)
        )

    def listed(self, **changes: InitialWeight) -> WeightSources:
        named = {f"weight:{name}": changes.get(name.replace(".", "_"), known) for name, known in self.initial.items()}
        return read_sources(sources_text(self.header, named), len(self.content))

    def get(
        self,
        listed: WeightSources | None,
        local: LocalWeights | None = None,
        cache: ArtifactCache | None = None,
        source: Coordinator | None = None,
    ) -> tuple[dict[str, Tensor], FetchProgress, list[str]]:
        said: list[str] = []
        progress = FetchProgress(len(self.content))
        artifacts = Artifacts(source or Coordinator(self.content), cache, said.append, local)

        async def list_sources() -> WeightSources:
            assert listed is not None
            self.listings += 1
            return listed

        given = None if listed is None else list_sources
        reader = asyncio.run(artifacts.get(self.ref, lambda: WeightsReader(self.ref.size_bytes), progress, given))
        tensors, _ = reader.finish()
        return tensors, progress, said

    def check(self, tensors: dict[str, Tensor]) -> None:
        assert all(torch.equal(tensors[f"weight:{name}"], weight) for name, weight in self.weights.items())


DRAWN = 4 * (9000 + 2 * 3000)
FROM_ELSEWHERE = 4 * 6300


def test_drawn_weights_do_not_travel() -> None:
    stage = Stage()
    coordinator = Coordinator(stage.content)
    tensors, progress, said = stage.get(stage.listed(), source=coordinator)
    stage.check(tensors)
    assert progress.drawn_bytes == DRAWN + len(stage.header)
    assert coordinator.sent_bytes == progress.fetched_bytes == len(stage.content) - progress.drawn_bytes
    assert not said and "were drawn here" in progress.last_line()


def test_without_a_list_everything_is_fetched() -> None:
    stage = Stage()
    tensors, progress, _ = stage.get(None)
    stage.check(tensors)
    assert progress.fetched_bytes == len(stage.content)


def test_a_draw_with_another_result_is_fetched_instead_and_the_user_is_told() -> None:
    stage = Stage()
    recipe = stage.initial["0.weight"].recipe
    assert recipe is not None
    other = replace(recipe, arguments=(-1.0, 1.0))
    tensors, progress, said = stage.get(stage.listed(**{"0_weight": replace(stage.initial["0.weight"], recipe=other)}))
    stage.check(tensors)
    assert progress.drawn_bytes == DRAWN - 4 * 9000 + len(stage.header)
    assert len(said) == 1 and "rounds random values differently" in said[0]


def test_a_recipe_that_cannot_be_made_is_fetched_instead() -> None:
    stage = Stage()
    wrong = replace(stage.initial["0.weight"], recipe=Recipe("constant", data=bytes(3)))
    tensors, _, said = stage.get(stage.listed(**{"0_weight": wrong}))
    stage.check(tensors)
    assert len(said) == 1 and "is no value of" in said[0]


def test_a_list_that_makes_other_weights_than_announced_is_refused() -> None:
    stage = Stage()
    zeros = find_initial({"0.weight": torch.zeros(90, 100)}, {})["0.weight"]
    with pytest.raises(RefusedError, match="arrived damaged"):
        stage.get(stage.listed(**{"0_weight": zeros}))


def test_a_partial_file_in_the_cache_is_continued_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    stage = Stage()
    cache = ArtifactCache(tmp_path, 1 << 30)
    kept = cache.open(stage.ref.sha256, stage.ref.size_bytes)
    assert kept is not None
    kept.append(stage.content[: len(stage.header) + 5001])
    kept.close()
    tensors, progress, _ = stage.get(stage.listed(), cache=cache)
    stage.check(tensors)
    assert progress.kept_bytes == len(stage.header) + 5001
    tensors, progress, _ = stage.get(stage.listed(), cache=cache)
    stage.check(tensors)
    assert progress.kept_bytes == len(stage.content) and not progress.fetched_bytes and stage.listings == 1


class Broken(Coordinator):
    """Breaks off in the middle of each range once."""

    async def fetch(self, artifact: str, offset: int = 0, end: int = 0) -> AsyncGenerator[bytes, None]:
        first = len(self.asked) % 2 == 0
        async for data in super().fetch(artifact, offset, end):
            yield data[:7] if first else data
            if first:
                raise PeerError("the line broke")


def test_a_range_that_breaks_off_continues_at_its_byte() -> None:
    stage = Stage()
    tensors, progress, _ = stage.get(stage.listed(), source=Broken(stage.content))
    stage.check(tensors)
    assert progress.fetched_bytes == len(stage.content) - progress.drawn_bytes


def stored(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def test_weights_of_a_file_here_do_not_travel(tmp_path: Path) -> None:
    stage = Stage()
    folder = stored(tmp_path / "a" / "b", {"net.2.weight": stage.weights["2.weight"], "other": torch.zeros(3)})
    tensors, progress, _ = stage.get(stage.listed(), LocalWeights([tmp_path]))
    stage.check(tensors)
    assert folder.exists() and progress.found_bytes == FROM_ELSEWHERE
    assert "were in files here" in progress.last_line()


def test_a_file_with_other_values_or_of_another_kind_is_not_used(tmp_path: Path) -> None:
    stage = Stage()
    stored(tmp_path / "values", {"2.weight": stage.weights["2.weight"] + 1})
    stored(tmp_path / "name", {"x2.weight": stage.weights["2.weight"]})
    stored(tmp_path / "shape", {"2.weight": stage.weights["2.weight"].T.contiguous()})
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    tensors, progress, _ = stage.get(stage.listed(), LocalWeights([tmp_path, tmp_path / "missing"]))
    stage.check(tensors)
    assert progress.found_bytes == 0


def test_a_tensor_is_hashed_once_while_its_file_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage()
    path = stored(tmp_path, {"2.weight": stage.weights["2.weight"] + 1}) / "model.safetensors"
    [asked] = [tensor for tensor in stage.listed().tensors if tensor.entry.name == "weight:2.weight"]
    local, reads = LocalWeights([tmp_path]), list[int]()
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    for _ in range(3):
        assert local.search(10**6).find(asked) is None
    assert len(reads) == 1
    stored(tmp_path, {"2.weight": stage.weights["2.weight"]})
    os.utime(path, ns=(1, 1))
    assert local.search(10**6).find(asked) is not None, "the file has changed"


def test_one_deployment_has_a_bounded_number_of_bytes_hashed(tmp_path: Path) -> None:
    stage = Stage()
    for number in range(8):
        stored(tmp_path, {"2.weight": stage.weights["2.weight"] + number}, f"{9 - number}.safetensors")
    [asked] = [tensor for tensor in stage.listed().tensors if tensor.entry.name == "weight:2.weight"]
    local, size_bytes = LocalWeights([tmp_path]), stage.weights["2.weight"].nbytes
    assert local.search(size_bytes).find(asked) is None, "four of eight were hashed"
    assert local.search(size_bytes).find(asked) is not None, "the others, as the hashes of the first are known"


def test_the_user_is_told_where_weights_are_looked_for(tmp_path: Path) -> None:
    said = searched_text([tmp_path, tmp_path / "more"])
    assert f"{tmp_path}, {tmp_path / 'more'} " in said and "--weights none" in said


def test_links_are_followed_inside_of_the_folder_alone(tmp_path: Path) -> None:
    stage = Stage()
    weight = {"2.weight": stage.weights["2.weight"]}
    outside, folder = stored(tmp_path / "outside", weight), tmp_path / "folder"
    (folder / "snapshots").mkdir(parents=True)
    link = folder / "snapshots" / "model.safetensors"
    link.symlink_to(outside / "model.safetensors")
    (folder / "more").symlink_to(outside, target_is_directory=True)
    assert stage.get(stage.listed(), LocalWeights([folder]))[1].found_bytes == 0
    link.unlink()
    stored(folder / "blobs", weight, "5f3a")
    link.symlink_to("../blobs/5f3a")
    assert stage.get(stage.listed(), LocalWeights([folder]))[1].found_bytes == FROM_ELSEWHERE


def test_the_hugging_face_cache_is_where_its_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert huggingface_folder() is None
    (tmp_path / "hub").mkdir()
    assert huggingface_folder() == tmp_path / "hub"
