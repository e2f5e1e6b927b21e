"""Order of the members of a ring: the one whose slowest line is fastest.

A ring is as fast as its slowest line, so the sum over the lines does not matter. For few members, dynamic programming
over sets of members finds the best order. For many, an order is improved line by line, the slowest first, until it
reaches a bound that no order can exceed, or no exchange helps.
"""

from typing import Any, Final

import numpy as np

from ravnest.planner.model_costs import Table

Order = np.ndarray[Any, np.dtype[np.intp]]

EXACT: Final = 12
"""Members up to which the order is the best possible."""

_TRIED: Final = 48
"""Places to cut and join an order that are tried first, before all of them."""

_KICKS: Final = 3000
"""Number of random restarts of an order that no exchange improves, divided by the number of members."""


def ring_order(rates: Table, start: Order | None = None) -> Order:
    """The order of members whose slowest line is fastest; member 0 comes first.

    `rates[i, j]` is the rate of the line from member i to member j, and `start` an order that is probably good. The
    first of equally good orders is returned: the same rates and start always give the same order.
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
    # Rates beyond the bound make no difference.
    capped = np.minimum(rates, bound)
    np.fill_diagonal(capped, -1.0)
    found = [_raised(capped, candidate, bound) for candidate in (first, _nearest_first(capped))]
    best = max(found, key=lambda order: slowest(capped, order))
    return _from_member_0(_kicked(capped, best, bound))


def slowest(rates: Table, order: Order) -> float:
    """The rate of the slowest line of the ring in this order; infinite for a single member."""
    if len(order) < 2:
        return float("inf")
    return float(rates[order, np.roll(order, -1)].min())


def fastest_possible(rates: Table) -> float:
    """A bound on the slowest line of any order: every member sends to another one, and receives from another one."""
    others = rates.copy()
    np.fill_diagonal(others, -1.0)
    return float(min(others.max(axis=0).min(), others.max(axis=1).min()))


def _from_member_0(order: Order) -> Order:
    return np.roll(order, -int(np.flatnonzero(order == 0)[0]))


def _exact(rates: Table) -> Order:
    """The best order, from the best slowest line from member 0 through every set of members to every last one of it."""
    others = len(rates) - 1
    lines, out, home = rates[1:, 1:], rates[0, 1:], rates[1:, 0]
    all_others = (1 << others) - 1
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
    last = int(np.argmax(np.minimum(best[all_others], home)))
    order, left = [], all_others
    while left:
        order.append(last + 1)
        left, last = left ^ (1 << last), int(came[left, last])
    return np.array([0, *reversed(order)])


def _nearest_first(rates: Table) -> Order:
    """From each member to the one with the fastest line from it; among equals, the one that others reach worst.

    The first member is the one that others reach worst: its line comes from the last member, which had no choice.
    """
    reached = np.sort(rates, axis=0)
    # A member with few good lines to it must be taken while one of their senders is free.
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
    """The order with its slowest line replaced again and again, while an exchange finds faster lines."""
    while True:
        along = rates[order, np.roll(order, -1)]
        worst = int(np.argmin(along))
        if along[worst] >= bound:
            return order
        # Turn the ring so that the slowest line leads from the last member to the first.
        order = np.roll(order, -(worst + 1))
        better = _exchanged(rates, order, float(along[worst]))
        if better is None:
            return order
        order = better


def _kicked(rates: Table, best: Order, bound: float) -> Order:
    """The best order found from this one by exchanging two parts at random places and improving the result."""
    numbers = np.random.default_rng(0)
    value = slowest(rates, best)
    for _ in range(_KICKS // len(best)):
        if value >= bound:
            break
        i, j = np.sort(numbers.choice(np.arange(1, len(best)), 2, replace=False))
        kicked = _raised(rates, np.concatenate([best[:i], best[j:], best[i:j]]), bound)
        # An equally good order is taken too: improvements may start from there.
        if slowest(rates, kicked) >= value:
            best, value = kicked, slowest(rates, kicked)
    return best


def _exchanged(rates: Table, order: Order, worst: float) -> Order | None:
    """The ring of three parts X Y Z, whose slowest line leads from Z to X, as X Z Y; None if a new line is no faster.

    No part changes its direction, so that all other lines stay the same.
    """
    from_last = rates[order[-1], order[1:-1]]
    to_first = rates[order[1:-1], order[0]]
    # X ends at i, Y at j: the last member sends to i + 1, and j sends to the first.
    ends = np.flatnonzero(from_last > worst)
    turns = np.flatnonzero(to_first > worst) + 1
    if not len(ends) or not len(turns):
        return None
    likely_ends = ends[np.argsort(-from_last[ends], kind="stable")[:_TRIED]]
    likely_turns = turns[np.argsort(-to_first[turns - 1], kind="stable")[:_TRIED]]
    for i, j in ((likely_ends, likely_turns), (ends, turns)):
        joined = np.minimum(rates[np.ix_(order[i], order[j + 1])], from_last[i][:, None])
        joined = np.minimum(joined, to_first[j - 1][None, :])
        joined[i[:, None] >= j[None, :]] = -1.0
        row, column = np.unravel_index(np.argmax(joined), joined.shape)
        if joined[row, column] > worst:
            x, y = int(i[row]) + 1, int(j[column]) + 1
            return np.concatenate([order[:x], order[y:], order[x:y]])
    return None
