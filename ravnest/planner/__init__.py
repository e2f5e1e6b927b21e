"""Which provider holds which stage: pure functions from measurements to a plan with a predicted number."""
