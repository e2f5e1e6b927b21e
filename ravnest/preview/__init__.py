"""Preview: the plan that `ravnest plan` computes from a nodes.toml and shows, without starting anything.

Knows the planner, and the parts of `coordinator` that plan a run, so that both plan by the same rules. Only `cli` may
import it.
"""
