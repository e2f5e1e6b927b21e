"""Local search over groupings: moves of a provider, exchanges, splits, merges, and changes with the standbys.

In each round, clusters are paired up, every pair gets a few random proposals, all of these are estimated at once, and
each pair takes its best one if it is better. The seed decides the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ravnest.planner.search.estimates import Estimates, Orders
from ravnest.planner.search.order import changes

Order = tuple[int, ...]

_REORDERINGS: Final = 3


@dataclass
class Grouping:
    """Orders of providers, the estimated rate of each, and the standbys."""

    orders: list[Order]
    rates: list[float]
    free: list[int]

    @property
    def together(self) -> float:
        return sum(self.rates)

    def copy(self) -> "Grouping":
        return Grouping(list(self.orders), list(self.rates), list(self.free))


@dataclass(frozen=True)
class Rules:
    """Limits of a grouping, and the value of a cluster in addition to its rate."""

    min_stages: int
    max_stages: int
    max_clusters: int
    standbys: int
    bonus: float
    min_clusters: int = 0
    max_free: int | None = None
    """Maximum number of standbys."""


@dataclass
class Improver:
    """Search for better groupings, with a cache of the rates of orders."""

    estimates: Estimates
    rng: np.random.Generator
    looked_at: int = 0
    """Number of orders so far, with those that were in the cache."""
    _known: dict[Order, float] = field(default_factory=dict)

    def improved(self, grouping: Grouping, rules: Rules, go_on: Callable[[], bool], proposals: int = 6) -> Grouping:
        """The grouping after small changes, as long as `go_on` allows and they still improve it."""
        now = grouping.copy()
        self._known.update(zip(now.orders, now.rates, strict=True))
        quiet = 0
        while go_on() and quiet < 12:
            found = self._round(now, rules, proposals)
            quiet = 0 if found else quiet + 1
        return now

    def reordered(self, grouping: Grouping) -> Grouping:
        """The same clusters, each in the best order that moves of one provider, or exchanges of two, lead to."""
        now = grouping.copy()
        now.rates = self.rates(now.orders)
        open_ = [c for c, order in enumerate(now.orders) if len(order) > 1]
        for _ in range(_REORDERINGS):
            tried = [
                (c, tuple(row)) for c in open_ for row in np.array(now.orders[c])[changes(len(now.orders[c]))].tolist()
            ]
            found: dict[int, tuple[float, Order]] = {}
            for (c, order), rate in zip(tried, self.rates([order for _, order in tried]), strict=True):
                if rate > max(now.rates[c] * (1 + 1e-6), found.get(c, (0.0,))[0]):
                    found[c] = rate, order
            for c, (rate, order) in found.items():
                now.orders[c], now.rates[c] = order, rate
            open_ = sorted(found)
        return now

    def rates(self, orders: Sequence[Order]) -> list[float]:
        """The estimated rate of each order."""
        self.looked_at += len(orders)
        wanted = [order for order in dict.fromkeys(orders) if order not in self._known]
        if wanted:
            rates, _ = self.estimates.rates(padded(wanted))
            self._known.update(zip(wanted, rates.tolist(), strict=True))
        return [self._known[order] for order in orders]

    def _round(self, now: Grouping, rules: Rules, proposals: int) -> bool:
        """One round of changes, in place; returns whether any was made."""
        pairs = self._pairs(now)
        spare = [now.free[i] for i in self.rng.permutation(len(now.free))]
        tried: list[tuple[int, list[Order], list[int]]] = []
        dealt: list[list[int]] = []
        for number, pair in enumerate(pairs):
            share = spare[3 * number : 3 * number + 3]
            dealt.append(share)
            for _ in range(proposals):
                proposal = self._proposal([now.orders[c] for c in pair], share, rules)
                if proposal is not None:
                    tried.append((number, *proposal))
        rest = spare[3 * len(pairs) :]
        for group in self._new_clusters(rest, now, rules):
            left = set(group)
            tried.append((len(pairs), [group], [i for i in rest if i not in left]))
            pairs.append(())
            dealt.append(list(rest))
        rates = iter(self.rates([order for _, orders, _ in tried for order in orders]))
        best: dict[int, tuple[float, list[Order], list[float], list[int]]] = {}
        for number, orders, left_over in tried:
            new = [next(rates) for _ in orders]
            if not all(new):
                continue
            old = [now.rates[c] for c in pairs[number]]
            gain = sum(new) - sum(old) + rules.bonus * (len(new) - len(old))
            if gain > 1e-9 * (1 + sum(old)) and gain > best.get(number, (0.0,))[0]:
                best[number] = gain, orders, new, left_over
        return self._apply(now, rules, pairs, dealt, best)

    def _apply(
        self,
        now: Grouping,
        rules: Rules,
        pairs: Sequence[tuple[int, ...]],
        dealt: Sequence[list[int]],
        best: dict[int, tuple[float, list[Order], list[float], list[int]]],
    ) -> bool:
        surplus = len(now.free) - rules.standbys
        room, spare = rules.max_clusters - len(now.orders), len(now.orders) - rules.min_clusters
        may_go = (rules.max_free or 0) - len(now.free)
        free, gone = set(now.free), set[int]()
        added: list[tuple[Order, float]] = []
        for number, (_, orders, rates, left_over) in sorted(best.items(), key=lambda item: (-item[1][0], item[0])):
            used = len(dealt[number]) - len(left_over)
            more = len(orders) - len(pairs[number])
            if (used > 0 and used > surplus) or (more > 0 and more > room) or not set(dealt[number]) <= free:
                continue
            if (more < 0 and -more > spare) or (used < 0 and rules.max_free is not None and -used > may_go):
                continue
            surplus, room = surplus - used, room - more
            spare, may_go = spare + more, may_go + used
            free = (free - set(dealt[number])) | set(left_over)
            gone.update(pairs[number])
            added += zip(orders, rates, strict=True)
        if not gone and not added:
            return False
        kept = [c for c in range(len(now.orders)) if c not in gone]
        now.orders = [now.orders[c] for c in kept] + [order for order, _ in added]
        now.rates = [now.rates[c] for c in kept] + [rate for _, rate in added]
        now.free = sorted(free)
        return True

    def _pairs(self, now: Grouping) -> list[tuple[int, ...]]:
        """All clusters in pairs: at random, or with one of about the same rate."""
        count = len(now.orders)
        mixed = self.rng.permutation(count)
        if self.rng.random() < 0.4:
            mixed = mixed[np.argsort(np.array(now.rates)[mixed] * self.rng.uniform(0.8, 1.25, count), kind="stable")]
        pairs: list[tuple[int, ...]] = [(int(a), int(b)) for a, b in zip(mixed[::2], mixed[1::2], strict=False)]
        if count % 2:
            pairs.append((int(mixed[-1]),))
        return pairs

    def _proposal(
        self, orders: Sequence[Order], spare: Sequence[int], rules: Rules
    ) -> tuple[list[Order], list[int]] | None:
        """New orders of the same providers and of spare ones, and the providers left over."""
        rng = self.rng
        flip = rng.random() < 0.5
        a, b = (orders[0], orders[-1]) if flip else (orders[-1], orders[0])
        alone = len(orders) == 1
        rest = [] if alone else [b]
        i = int(rng.integers(len(a)))
        draw = rng.random()
        new: list[Order]
        left = list(spare)
        if draw < 0.12:
            j = int(rng.integers(len(a)))
            if i == j:
                return None
            changed = list(a)
            if rng.random() < 0.5:
                changed[i], changed[j] = changed[j], changed[i]
            else:
                changed.insert(j, changed.pop(i))
            new = [tuple(changed), *rest]
        elif draw < 0.3 and spare:
            at = int(rng.integers(len(spare)))
            left[at] = a[i]
            new = [(*a[:i], spare[at], *a[i + 1 :]), *rest]
        elif draw < 0.38 and spare:
            new = [(*a[:i], left.pop(int(rng.integers(len(left)))), *a[i:]), *rest]
        elif draw < 0.46:
            left.append(a[i])
            new = [(*a[:i], *a[i + 1 :]), *rest]
        elif draw < 0.52:
            new = self._split(a) + rest
        elif alone:
            return None
        elif draw < 0.7:
            j = int(rng.integers(len(b)))
            new = [(*a[:i], b[j], *a[i + 1 :]), (*b[:j], a[i], *b[j + 1 :])]
        elif draw < 0.84:
            j = int(rng.integers(len(b) + 1))
            new = [(*a[:i], *a[i + 1 :]), (*b[:j], a[i], *b[j:])]
        elif draw < 0.95:
            new = self._split((*a, *b))
        else:
            new = [self._arranged((*a, *b))]
        if not all(rules.min_stages <= len(order) <= rules.max_stages for order in new):
            return None
        return new, left

    def _split(self, members: Order) -> list[Order]:
        """The members in two clusters, sorted by a random mix of speed and bandwidth."""
        speed, line = self.estimates.speed, self.estimates.line_speed
        weight = self.rng.random()
        ranked = sorted(members, key=lambda i: (speed[i] ** weight * line[i] ** (1 - weight), i))
        if len(ranked) < 2:
            return [members]
        middle = 1 + int(self.rng.integers(len(ranked) - 1))
        return [self._arranged(ranked[:middle]), self._arranged(ranked[middle:])]

    def _arranged(self, members: Sequence[int]) -> Order:
        line = self.estimates.line_speed
        ranked = sorted(members, key=lambda i: (line[i], i))
        return (*ranked[::2], *ranked[1::2][::-1])

    def _new_clusters(self, spare: Sequence[int], now: Grouping, rules: Rules) -> list[Order]:
        """New clusters of standbys."""
        sizes = sorted({len(order) for order in now.orders[:200]} | {rules.min_stages})
        found = []
        for size in sizes:
            if rules.min_stages <= size <= min(rules.max_stages, len(spare)):
                found.append(self._arranged([int(i) for i in self.rng.choice(spare, size, replace=False)]))
        return found


def padded(orders: Sequence[Order]) -> Orders:
    """Orders of different lengths as rows, padded with -1."""
    longest = max((len(order) for order in orders), default=0)
    rows = [(*order, *(-1,) * (longest - len(order))) for order in orders]
    return np.array(rows, dtype=np.int64).reshape(len(orders), longest)
