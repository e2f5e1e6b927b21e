"""Weight versions of one stage, so that a backward can use the same weights as its forward.

Earlier microbatches may update the stage between a microbatch's forward and its backward. Each version is a set of leaf
tensors over memory of its own. An update writes in place while no microbatch holds the current version, and copies the
weights to new memory first when one does. The number of copies is therefore the number of versions in use.

Parameters that no backward reads, such as tables whose rows are only looked up, need no versions: every update writes
them in place.
"""

from collections.abc import Callable, Collection, Mapping

import torch


class Version:
    """The weights after update `number`; forward and backward compute with `leaves`, by name in the graph."""

    __slots__ = ("leaves", "number", "users")

    def __init__(self, number: int, leaves: dict[str, torch.Tensor]) -> None:
        self.number = number
        self.leaves = leaves
        self.users = 0


class WeightVersions:
    """The master parameters that the optimizer steps, and the versions of them that are in use."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], number: int = 0, unread: Collection[str] = ()) -> None:
        """`unread`: the parameters that no backward reads."""
        self.unread = frozenset(unread)
        self.masters = {name: torch.nn.Parameter(tensor) for name, tensor in parameters.items()}
        self._current = Version(number, self._leaves())
        self.on_write: Callable[[], None] = lambda: None
        """Called before the current weights change."""

    @property
    def current(self) -> Version:
        return self._current

    def acquire(self, instead: dict[str, torch.Tensor] | None = None) -> Version:
        """The current version, held until `release`. With `instead`, a version of the same number with those leaves,
        except those of unread parameters."""
        if instead is not None:
            own = {name: self._current.leaves[name] for name in self.unread}
            version = Version(self._current.number, instead | own if own else instead)
            version.users = 1
            return version
        self._current.users += 1
        return self._current

    def copy_of(self, version: Version) -> int:
        """Identity of the copy of the weights that a version uses; versions with the same leaves share one."""
        return next((id(leaf) for name, leaf in version.leaves.items() if name not in self.unread), 0)

    def release(self, version: Version) -> None:
        assert version.users > 0, "a version was released more often than acquired"
        version.users -= 1

    def begin_update(self) -> None:
        """Makes the masters safe to write: in new memory if a microbatch in flight holds the current version."""
        self.on_write()
        for name, master in self.masters.items():
            before = self.renew(name)
            if before is not None:
                master.data.copy_(before)

    def renew(self, name: str, memory: torch.Tensor | None = None) -> torch.Tensor | None:
        """Makes one master safe to write: if a microbatch in flight holds the current version, the master gets other
        memory, and the result is the old memory, which the caller must copy. None: the master keeps its memory.

        `memory` is used instead of new memory; it has the shape of the master. An update calls `on_write`, and then
        this for each master instead of `begin_update`, to copy while it steps.
        """
        if not self._current.users or name in self.unread:
            return None
        master = self.masters[name]
        before = master.data
        master.data = torch.empty_like(before) if memory is None else memory
        return before

    def finish_update(self) -> None:
        """Makes the masters, as written, the next version."""
        number = self._current.number + 1
        if self._current.users:
            self._current = Version(number, self._leaves())
        else:
            self._current.number = number

    def finish_change(self) -> None:
        """Makes the masters, as written, the current version, under the same number: the change was no update."""
        if self._current.users:
            self._current = Version(self._current.number, self._leaves())

    def _leaves(self) -> dict[str, torch.Tensor]:
        # `.data` shares the memory but not the counter by which autograd detects in-place writes. This is safe: a
        # version in use is never written (begin_update), and a version not in use is part of no autograd graph.
        return {name: master.data.requires_grad_() for name, master in self.masters.items()}
