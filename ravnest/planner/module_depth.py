"""Module boundaries in a model: how deep inside its modules each place lies.

A stage may begin between any two operators. A person would cut between two blocks instead of inside one, if nothing
speaks against it. The names of parameters tell the modules: the operators before and after a place belong to the
modules whose parameters were last used and are used next, and the place lies inside every module that both are part of.
"""

from collections.abc import Iterable

from ravnest.graph.cutting.layout import Layout
from ravnest.graph.portable import PortableGraph


def module_depths(graph: PortableGraph, plan: Layout) -> list[int]:
    """For every place of the line, from before the first operator to after the last, the number of modules around it;
    0 between two modules of the whole model, and before and after everything that has weights."""
    modules = {weight.name: tuple(weight.key.split(".")[:-1]) for weight in graph.weights}
    used = [_used(modules, node.references()) for node in plan.line]
    before: list[tuple[str, ...] | None] = [None]
    for module in used:
        before.append(module if module is not None else before[-1])
    after: list[tuple[str, ...] | None] = [None]
    for module in reversed(used):
        after.append(module if module is not None else after[-1])
    after.reverse()
    return [0 if a is None or b is None else _common(a, b) for a, b in zip(before, after, strict=True)]


def _used(modules: dict[str, tuple[str, ...]], references: Iterable[str]) -> tuple[str, ...] | None:
    """The module whose weights an operator uses, the deepest if there are several; None if it uses none."""
    found = [modules[name] for name in references if name in modules]
    return max(found, key=len, default=None)


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
