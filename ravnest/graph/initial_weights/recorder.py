"""Recorder of random draws: notes how tensors are initialised while a job file runs.

While the recorder is active, the operators that fill a tensor of the CPU with random values note the position of the
generator before the draw. Their results are the same as without the recorder. A note is only a hint: what a tensor
becomes after its draw is not followed, so `find_initial` compares every value.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from ravnest.errors import GraphError
from ravnest.graph.initial_weights.generator_position import position_of
from ravnest.graph.initial_weights.recipe import Recipe

MIN_BYTES: Final = 8192
"""Smallest tensor whose draw is noted: its recipe has some 3.5 kB."""

MAX_DRAWS: Final = 16384
"""Maximum number of notes, of 2.5 kB each; the oldest are dropped."""

Place = tuple[int, int]
"""Address and size of a tensor's memory."""

_draws_of: "weakref.WeakKeyDictionary[nn.Module, Mapping[Place, Recipe]]" = weakref.WeakKeyDictionary()


def place_of(tensor: Tensor) -> Place:
    """The memory of a tensor, by which its draw is found."""
    return tensor.data_ptr(), tensor.nbytes


def draws_of(model: nn.Module) -> Mapping[Place, Recipe]:
    """The noted draws into the tensors of a model; empty if it was made without a recorder."""
    return _draws_of.get(model, {})


class DrawRecorder:
    """Context in which draws are noted."""

    def __init__(self) -> None:
        self._drawn: dict[Place, Recipe] = {}
        self._is_active = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self._is_active = True
        self._replace(torch.Tensor, "normal_", self._noting("normal", (0.0, 1.0), ("mean", "std")))
        self._replace(torch.Tensor, "uniform_", self._noting("uniform", (0.0, 1.0), ("from", "to")))
        truncated = self._noting("truncated_normal", (0.0, 1.0, -2.0, 2.0), ("mean", "std", "a", "b"))
        # The public function may have been imported by name before; it calls this one.
        self._replace(torch.nn.init, "_no_grad_trunc_normal_", truncated)
        # Not functions such as `torch.randn`: TorchScript knows them by identity, and would refuse another one.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A function that was imported by name while it was replaced stays: it then notes nothing.
        self._is_active = False
        while self._undo:
            self._undo.pop()()

    def keep_for(self, model: nn.Module) -> None:
        """Keeps the notes about the tensors of a model, for as long as the model lives."""
        tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
        places = [place_of(tensor) for tensor in tensors if _is_plain(tensor)]
        _draws_of[model] = {place: self._drawn[place] for place in places if place in self._drawn}
        self._drawn = {}

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, original))
        else:
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, wrap(original))

    def _noting(self, draw: str, defaults: tuple[float, ...], names: tuple[str, ...]) -> Callable[[Any], Any]:
        """Wrapper of an operator that draws into its first argument."""

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def noting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                given = [*args, *defaults[len(args) :]][: len(defaults)]
                for number, name in enumerate(names):
                    given[number] = kwargs.get(name, given[number])
                generator = kwargs.get("generator") or (args[len(defaults)] if len(args) > len(defaults) else None)
                position = self._position(generator) if self._is_active and _is_worth_it(tensor) else None
                result = original(tensor, *args, **kwargs)
                if position is not None:
                    self._note(tensor, draw, given, position)
                return result

            return noting

        return wrap

    def _position(self, generator: object) -> bytes | None:
        """The position before a draw; None if the generator is not one of the CPU."""
        chosen = torch.default_generator if generator is None else generator
        if not isinstance(chosen, torch.Generator) or chosen.device.type != "cpu":
            return None
        try:
            return position_of(chosen)
        except GraphError:
            return None

    def _note(self, tensor: Tensor, draw: str, arguments: list[object], position: bytes) -> None:
        place = place_of(tensor)
        self._drawn.pop(place, None)
        if any(type(value) not in (int, float) for value in arguments):
            return
        self._drawn[place] = Recipe(draw, tuple(float(value) for value in arguments), position)  # type: ignore[arg-type]
        if len(self._drawn) > MAX_DRAWS:
            del self._drawn[next(iter(self._drawn))]


def _is_plain(tensor: object) -> bool:
    """Whether it is an ordinary tensor in memory: no fake, meta, sparse or batched one."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(tensor, Tensor)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.is_contiguous() and tensor.data_ptr() != 0
    except RuntimeError:
        # A tensor inside of `vmap` has no memory of its own.
        return False


def _is_worth_it(tensor: object) -> bool:
    return _is_plain(tensor) and tensor.nbytes >= MIN_BYTES  # type: ignore[attr-defined]
