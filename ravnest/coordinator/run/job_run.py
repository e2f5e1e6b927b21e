"""Run of a job: what lives from the preparation of the job until the run ends, whichever deployment is current."""

from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.coordinator.plan.observed_limits import ObservedLimits
from ravnest.coordinator.plan.prepared_job import PreparedJob
from ravnest.coordinator.plan.provider_profiles import Machine
from ravnest.coordinator.run.checkpointer import Checkpointer
from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.data_walk import DataWalk
from ravnest.coordinator.run.dispatcher import Dispatcher
from ravnest.coordinator.run.exclusions import Exclusions


class JobRun:
    """Owns the dispatcher, the checkpointer and the walk through the data, which every deployment uses."""

    def __init__(self, context: RunContext, prepared: PreparedJob, store: CheckpointStore, machine: Machine) -> None:
        """`machine` is the coordinator's."""
        self.context = context
        self.prepared = prepared
        """The job with the state that the run starts from."""
        self.start = context.ledger.applied
        """The position in the data to which that state belongs."""
        self.store = store
        self.machine = machine
        self.dispatcher = Dispatcher(context, prepared.captured.graph.inputs)
        self.checkpointer = Checkpointer(context, store, prepared)
        self.walk = DataWalk()
        self.limits = ObservedLimits()
        self.exclusions = Exclusions()
