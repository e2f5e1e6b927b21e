"""Budget of state on a line: shares that the planner counts with and that senders keep to.

State is what is saved, replicated, averaged or deployed; activations and gradients go first.
"""

from typing import Final

BUDGET_SHARE: Final = 0.15
"""Largest share of a line that state takes on average while training goes on."""
FLOOR_SHARE: Final = 0.03
"""Share of a line that state gets however busy the line is, so that no transfer starves."""
LEFT_SHARE: Final = 0.9
"""Largest share that state takes of what activations and gradients leave."""
