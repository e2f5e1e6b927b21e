"""A ring in memory: pieces go from each member to the next, in an order that the test chooses."""

import random
from collections import deque
from collections.abc import Sequence

from ravnest.averaging.ring_reduce import Piece, RingReduce


def run_ring(members: Sequence[RingReduce], seed: int | None = None) -> int:
    """Deliver all pieces in the order in which they were sent, or shuffled by `seed`; returns their number."""
    lines: deque[tuple[int, Piece]] = deque()
    count = len(members)
    for i, member in enumerate(members):
        lines.extend(((i + 1) % count, piece) for piece in member.start())
    order = random.Random(seed)
    delivered = 0
    while lines:
        if seed is not None:
            lines.rotate(order.randrange(len(lines)))
        to, piece = lines.popleft()
        delivered += 1
        onward = members[to].receive(piece)
        if onward is not None:
            lines.append(((to + 1) % count, onward))
    return delivered
