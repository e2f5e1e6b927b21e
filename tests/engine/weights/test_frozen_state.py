"""A frozen state is that of its moment, whatever the stage does while it is read."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from ravnest.engine.stage import Stage
from ravnest.engine.weights import frozen_state as module
from ravnest.engine.weights.frozen_state import FrozenState, FrozenStates, StateTensors
from ravnest.errors import RunError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.weights import stream_tensors
from ravnest.settings import CORRECTIONS
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import a_net, batches
from tests.engine.stages import stages_of


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(a_net(), F.cross_entropy, {}, batches([8, 5]))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, blocks and copies such that the tensors of a small net are large ones."""
    monkeypatch.setattr(module, "PIECE_BYTES", 4 * 24)
    monkeypatch.setattr(module, "SMALL_BYTES", 16)
    monkeypatch.setattr("ravnest.engine.weights.blocks.BLOCK_BYTES", 4 * 64)


class Trained:
    """A stage that trains with some microbatches in flight."""

    def __init__(self, captured: Captured, optimizer: OptimizerSpec, ahead: int = 0, **settings: object) -> None:
        [self.stage] = stages_of(captured, [captured.graph], optimizer, **settings)
        self._data = [captured.structure.flatten(batch) for batch in batches([8] * 4)]
        self._ahead = ahead
        self._number = 0

    def update(self) -> None:
        self.stage.forward(self._number, self._data[self._number % 4])
        if self._number >= self._ahead:
            self.stage.backward(self._number - self._ahead, None)
            self.stage.update(self._number - self._ahead)
        self._number += 1


def frozen(stage: Stage) -> tuple[FrozenState, bytes]:
    """The frozen state, and the bytes that it must give."""
    tensors, metadata = stage.state()
    expected = b"".join(stream_tensors({name: tensor.clone() for name, tensor in tensors.items()}, metadata))
    state = tensors.freeze(metadata)
    assert state is not None and state.size_bytes == len(expected)
    return state, expected


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("correction", "ahead"), [("none", 0), *((correction, 3) for correction in CORRECTIONS)])
@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("AdamW", "float32"), ("AdamW", "8bit"), ("NAdam", "float32"), ("SGD", "float32"), ("Adagrad", "float32")],
)
def test_the_state_is_that_of_its_moment_wherever_the_reader_is(
    captured: Captured, optimizer: str, correction: str, ahead: int, moments: str
) -> None:
    more = {"lr": 0.05, "momentum": 0.9} if optimizer == "SGD" else {}
    training = Trained(captured, OptimizerSpec(optimizer, more), ahead, correction=correction, moments=moments)
    for _ in range(ahead + 2):
        training.update()
    state, expected = frozen(training.stage)
    chunks, found = state.chunks(), b""
    while not state.is_over:
        training.update()
        for _ in range(7):
            found += next(chunks, b"")
    assert found == expected


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("versions", ["stash", "stash_8bit", "in_place", "latest", "recompute"])
def test_every_version_policy_leaves_it_as_it_is(captured: Captured, versions: str) -> None:
    training = Trained(captured, OptimizerSpec("AdamW"), 2, versions=versions)
    for _ in range(4):
        training.update()
    state, expected = frozen(training.stage)
    for _ in range(3):
        training.update()
    assert b"".join(state.chunks()) == expected


@pytest.mark.usefixtures("small_pieces")
def test_a_shift_leaves_it_as_it_is(captured: Captured) -> None:
    training = Trained(captured, OptimizerSpec("AdamW"))
    training.update()
    state, expected = frozen(training.stage)
    tensors, _ = training.stage.state()
    training.stage.shift({name: torch.ones_like(tensor) for name, tensor in tensors.items() if tensor.dim()})
    assert b"".join(state.chunks()) == expected


@pytest.mark.usefixtures("small_pieces")
def test_several_states_at_once_keep_each_its_own_moment(captured: Captured) -> None:
    training = Trained(captured, OptimizerSpec("AdamW"))
    kept = []
    for _ in range(3):
        training.update()
        kept.append(frozen(training.stage))
    training.update()
    assert all(b"".join(state.chunks()) == expected for state, expected in reversed(kept))


def large_state(values: int = 1 << 20) -> tuple[dict[str, torch.Tensor], FrozenStates]:
    return {"param:w": torch.arange(values, dtype=torch.float32), "buffer:n": torch.tensor(3)}, FrozenStates()


def test_what_is_read_already_is_not_saved() -> None:
    tensors, states = large_state()
    state = FrozenState(tensors, {}, max_saved_bytes=1)
    states.add(state)
    chunks = state.chunks()
    for _ in range(5):  # The header and the buffer come first.
        next(chunks)
    # The first three pieces are read: with room for nothing more than one piece, this would wait forever otherwise.
    states.protect(tensors["param:w"][: 3 * (module.PIECE_BYTES // 4)])
    states.protect(tensors["param:w"][-1:])
    assert len([*chunks]) == 1


def test_the_stage_waits_for_a_reader_that_is_too_far_behind() -> None:
    tensors, states = large_state()
    expected = b"".join(stream_tensors({name: tensor.clone() for name, tensor in tensors.items()}, {}))
    state = FrozenState(tensors, {}, max_saved_bytes=module.PIECE_BYTES)
    states.add(state)
    is_over = threading.Event()

    def overwrite() -> None:
        for part in tensors["param:w"].split(1000):
            states.protect(part)
            part.zero_()
        is_over.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    found = b"".join(state.chunks())
    thread.join()
    assert found == expected and is_over.is_set()


@pytest.mark.parametrize("give_up", ["release", "close"])
def test_a_reader_that_gives_up_lets_the_stage_go_on(give_up: str) -> None:
    tensors, states = large_state()
    state = FrozenState(tensors, {}, max_saved_bytes=1)
    states.add(state)
    chunks: Iterator[bytes] = state.chunks()
    next(chunks)
    thread = threading.Thread(target=lambda: states.protect(tensors["param:w"]))
    thread.start()
    if give_up == "release":
        state.release()
    else:
        chunks.close()  # type: ignore[attr-defined]
    thread.join()
    assert state.is_over


def test_a_state_that_was_given_up_gives_no_bytes_but_an_error() -> None:
    tensors = {"small": torch.ones(3), "large": torch.ones(1 << 20)}
    for read in (0, 1, 2):
        state = FrozenState(tensors, {})
        chunks = state.chunks()
        for _ in range(read):
            assert next(chunks)
        state.release()
        with pytest.raises(RunError, match="given up"):
            next(chunks)
    state = FrozenState(tensors, {})
    assert len(b"".join(state.chunks())) == state.size_bytes
    with pytest.raises(RunError, match="given up"):
        next(state.chunks())


def test_tensors_of_one_memory_and_views_are_protected() -> None:
    memory = torch.arange(1 << 18, dtype=torch.float32)
    tensors = {"a": memory[: 1 << 17], "b": memory[1 << 16 :], "c": memory}
    expected = b"".join(stream_tensors({name: tensor.clone() for name, tensor in tensors.items()}, {}))
    states = FrozenStates()
    state = FrozenState(tensors, {})
    states.add(state)
    for part in memory.view(512, 512).split(100):
        states.protect(part)
        part.zero_()
    assert b"".join(state.chunks()) == expected


def test_a_state_in_another_order_of_memory_cannot_be_frozen() -> None:
    tensors = StateTensors({"param:w": torch.zeros(512, 256).t()}, FrozenStates())
    assert tensors.freeze({}) is None
    assert StateTensors({"param:w": torch.zeros(5, 2).t()}, FrozenStates()).freeze({}) is not None
