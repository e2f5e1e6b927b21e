"""In which order the members of a ring pass on what they average: the order whose slowest line is fastest.

A ring is as fast as its slowest line, so the sum over the lines does not matter. For few members the best order is
found for every set of them, from the smallest sets up; for many, an order is improved line by line, the slowest first,
until it reaches a bound that no order can exceed or no exchange helps.
"""

from typing import Any, Final

import numpy as np

from ravnest.planner.model_costs import Table

Order = np.ndarray[Any, np.dtype[np.intp]]

EXACT: Final = 12
"""Up to so many members the order is the best there is."""

_TRIED: Final = 48
"""Places where an order is cut and joined anew that are looked at first, before all of them."""

_KICKS: Final = 3000
"""How often, over the number of members, an order that no exchange improves is disturbed and improved again."""


def ring_order(rates: Table, start: Order | None = None) -> Order:
    """The order of members whose slowest line is fastest; member 0 comes first.

    `rates[i, j]` is what the line from member i to member j carries; `start` an order that is probably good. Of two
    orders that are as good the one found first is taken: the same rates and start always give the same order.
    """
    count = len(rates)
    if count <= 2:
        return np.arange(count)
    bound = fastest_possible(rates)
    first = np.arange(count) if start is None else start
    if slowest(rates, first) >= bound:
        return _from_member_0(first)
    if count <= EXACT:
        return _exact(rates)
    # Beyond the bound a faster line brings nothing.
    capped = np.minimum(rates, bound)
    np.fill_diagonal(capped, -1.0)
    found = [_raised(capped, candidate, bound) for candidate in (first, _nearest_first(capped))]
    best = max(found, key=lambda order: slowest(capped, order))
    return _from_member_0(_kicked(capped, best, bound))


def slowest(rates: Table, order: Order) -> float:
    """What the slowest line of the ring in this order carries; without a limit where there is one member alone."""
    if len(order) < 2:
        return float("inf")
    return float(rates[order, np.roll(order, -1)].min())


def fastest_possible(rates: Table) -> float:
    """What the slowest line of no order can exceed: every member sends to one of the others, and receives from one."""
    others = rates.copy()
    np.fill_diagonal(others, -1.0)
    return float(min(others.max(axis=0).min(), others.max(axis=1).min()))


def _from_member_0(order: Order) -> Order:
    return np.roll(order, -int(np.flatnonzero(order == 0)[0]))


def _exact(rates: Table) -> Order:
    """For every set of members and every last one of it, the fastest slowest line on the way there from member 0."""
    others = len(rates) - 1
    lines, out, home = rates[1:, 1:], rates[0, 1:], rates[1:, 0]
    everyone = (1 << others) - 1
    best = np.full((1 << others, others), -1.0)
    came = np.zeros((1 << others, others), dtype=np.intp)
    for last in range(others):
        best[1 << last, last] = out[last]
    sets = np.arange(1 << others)
    size = sum(sets >> bit & 1 for bit in range(others))
    for members in range(2, others + 1):
        for last in range(others):
            here = sets[(size == members) & (sets >> last & 1 == 1)]
            through = np.minimum(best[here ^ (1 << last)], lines[:, last])
            came[here, last] = np.argmax(through, axis=1)
            best[here, last] = np.max(through, axis=1)
    last = int(np.argmax(np.minimum(best[everyone], home)))
    order, left = [], everyone
    while left:
        order.append(last + 1)
        left, last = left ^ (1 << last), int(came[left, last])
    return np.array([0, *reversed(order)])


def _nearest_first(rates: Table) -> Order:
    """From each member on to the one with the fastest line from it; of those as fast, the one that others reach worst.

    It begins with whom others reach worst: who comes first has the last one before it, whom nobody chose.
    """
    reached = np.sort(rates, axis=0)
    # Whoever has few good lines leading to it must be taken while one of those is free.
    few = reached[len(rates) // 2] + reached.max(axis=0)
    here = int(np.argmax(few))
    left = np.ones(len(rates), dtype=bool)
    order = [here]
    left[here] = False
    while len(order) < len(rates):
        line = np.where(left, rates[here], -2.0)
        equal = np.flatnonzero(line == line.max())
        here = int(equal[np.argmin(few[equal])])
        order.append(here)
        left[here] = False
    return np.array(order)


def _raised(rates: Table, order: Order, bound: float) -> Order:
    """The order with its slowest line replaced, time and again, while its members can be joined by faster ones."""
    while True:
        along = rates[order, np.roll(order, -1)]
        worst = int(np.argmin(along))
        if along[worst] >= bound:
            return order
        # From here on the slowest line is the one from the last member back to the first.
        order = np.roll(order, -(worst + 1))
        better = _exchanged(rates, order, float(along[worst]))
        if better is None:
            return order
        order = better


def _kicked(rates: Table, best: Order, bound: float) -> Order:
    """The best order found from this one by exchanging three parts at random places, and improving what comes of it."""
    numbers = np.random.default_rng(0)
    value = slowest(rates, best)
    for _ in range(_KICKS // len(best)):
        if value >= bound:
            break
        i, j = np.sort(numbers.choice(np.arange(1, len(best)), 2, replace=False))
        kicked = _raised(rates, np.concatenate([best[:i], best[j:], best[i:j]]), bound)
        # One that is as good is taken as well: from there on another way may lead up.
        if slowest(rates, kicked) >= value:
            best, value = kicked, slowest(rates, kicked)
    return best


def _exchanged(rates: Table, order: Order, worst: float) -> Order | None:
    """The ring in three parts X Y Z, of which Z closes it at `worst`, as X Z Y; None where a new line is no faster.

    No part changes its direction, so all other lines stay what they were.
    """
    from_last = rates[order[-1], order[1:-1]]
    to_first = rates[order[1:-1], order[0]]
    # X ends at i, Y at j: the last member sends to i + 1, and j sends to the first.
    ends = np.flatnonzero(from_last > worst)
    turns = np.flatnonzero(to_first > worst) + 1
    if not len(ends) or not len(turns):
        return None
    few = ends[np.argsort(-from_last[ends], kind="stable")[:_TRIED]]
    some = turns[np.argsort(-to_first[turns - 1], kind="stable")[:_TRIED]]
    for i, j in ((few, some), (ends, turns)):
        joined = np.minimum(rates[np.ix_(order[i], order[j + 1])], from_last[i][:, None])
        joined = np.minimum(joined, to_first[j - 1][None, :])
        joined[i[:, None] >= j[None, :]] = -1.0
        row, column = np.unravel_index(np.argmax(joined), joined.shape)
        if joined[row, column] > worst:
            x, y = int(i[row]) + 1, int(j[column]) + 1
            return np.concatenate([order[:x], order[y:], order[x:y]])
    return None
