"""Weight versions of one stage: a backward always sees the weights its forward used.

Between a microbatch's forward and its backward the stage may be updated by earlier microbatches. Each version is a set
of leaf tensors over its own memory. An update writes in place as long as nobody holds the current version, and moves
the weights to fresh memory first when somebody does: so the number of copies is the number of versions really in use,
and no more.
"""

from collections.abc import Mapping

import torch


class Version:
    """The weights after update `number`; `leaves` are what forward and backward work on, by name in the graph."""

    __slots__ = ("leaves", "number", "users")

    def __init__(self, number: int, leaves: dict[str, torch.Tensor]) -> None:
        self.number = number
        self.leaves = leaves
        self.users = 0


class WeightVersions:
    """The master parameters that the optimizer steps, and the versions of them that are still in use."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], number: int = 0) -> None:
        self.masters = {name: torch.nn.Parameter(tensor) for name, tensor in parameters.items()}
        self._current = Version(number, self._leaves())

    @property
    def current(self) -> Version:
        return self._current

    def acquire(self, instead: dict[str, torch.Tensor] | None = None) -> Version:
        """The current version, held until `release`; with these leaves in place of its own, where there are some."""
        if instead is not None:
            version = Version(self._current.number, instead)
            version.users = 1
            return version
        self._current.users += 1
        return self._current

    def release(self, version: Version) -> None:
        assert version.users > 0, "a version was released more often than acquired"
        version.users -= 1

    def begin_update(self) -> None:
        """Makes the masters safe to write: fresh memory where the current version is held by a microbatch in flight."""
        if self._current.users:
            for master in self.masters.values():
                master.data = master.data.clone()

    def finish_update(self) -> None:
        """The masters as written are the next version."""
        number = self._current.number + 1
        if self._current.users:
            self._current = Version(number, self._leaves())
        else:
            self._current.number = number

    def finish_change(self) -> None:
        """The masters as written are what the current version is from now on; a change that is no update."""
        if self._current.users:
            self._current = Version(self._current.number, self._leaves())

    def _leaves(self) -> dict[str, torch.Tensor]:
        # `.data` shares the memory but not the counter by which autograd notices in-place writes: a version that is
        # held is
        # never written (begin_update), and one that is not held has no graph that could notice.
        return {name: master.data.requires_grad_() for name, master in self.masters.items()}
