"""Averaging with nothing in flight, also when the run is redeployed meanwhile."""

from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.context import RunContext


async def average_now(context: RunContext, current: CurrentDeployment, reason: str) -> None:
    """Returns when all clusters have the same model. `reason` is text like "at the end"."""
    while (averaging := current.now.averaging) is not None:
        context.enter_fed(Phase.AVERAGING)
        await averaging.now(reason)
        if averaging is current.now.averaging:
            return
        await context.until(lambda: current.now.is_drained)
