"""Bytes that operators move between main memory and a cache, counted on a model of the cache.

The model is a cache of pages that drops the page used longest ago, and writes it back if it was changed. Reading a page
that is not in the cache counts as much as writing one back. Operators are seen by torch's dispatcher, so the count
depends neither on the machine nor on its load.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PAGE_BYTES: Final = 1 << 14
CACHE_BYTES: Final = 8 << 20
"""About what one core of an ordinary PC has in its caches."""

_ONLY_WRITE: Final = ("copy_", "_foreach_copy_", "zero_", "fill_")


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes that operators read from and write to main memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache: OrderedDict[int, bool] = OrderedDict()
        """Whether each page in the cache was changed, by address; the page used longest ago first."""
        self._moved = 0

    def moved_bytes(self) -> int:
        """The bytes moved so far, if the changed pages in the cache are written back now."""
        return self._moved + PAGE_BYTES * sum(self._cache.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        schema = func._schema
        values = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | given
        aliases = [a for a in schema.arguments if a.alias_info is not None]
        if any(not a.alias_info.is_write for a in aliases):
            # A view touches no memory.
            return result
        written = {a.name for a in aliases}
        for name, value in values.items():
            reads = name != "out" and not (name in written and func._schema.name.split("::")[1] in _ONLY_WRITE)
            for tensor in _tensors(value):
                self._touch(tensor, reads=reads, writes=name in written)
        if not written:
            for tensor in _tensors(result):
                self._touch(tensor, reads=False, writes=not func._schema.name.startswith("aten::empty"))
        return result

    def _touch(self, tensor: torch.Tensor, *, reads: bool, writes: bool) -> None:
        if not reads and not writes:
            return
        first = tensor.data_ptr()
        for page in range(first // PAGE_BYTES, -(-(first + tensor.nbytes) // PAGE_BYTES)):
            changed = self._cache.pop(page, None)
            if changed is None and reads:
                self._moved += PAGE_BYTES
            self._cache[page] = writes or bool(changed)
            if len(self._cache) > CACHE_BYTES // PAGE_BYTES and self._cache.popitem(last=False)[1]:
                self._moved += PAGE_BYTES


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return []
