"""What a stage knows of values that are not finite, as the message that the coordinator gets."""

from ravnest.engine.not_finite import Testimony
from ravnest.net.v1.control_pb2 import ProviderMessage, Traced


def traced(deployment: str, microbatch: int, said: Testimony) -> ProviderMessage:
    """The message that says so."""
    return ProviderMessage(
        traced=Traced(
            deployment=deployment,
            microbatch=microbatch,
            received=said.forward.received,
            sent=said.forward.sent,
            kind=said.forward.kind,
            where=said.forward.where,
            gradients_received=said.gradients_received,
            gradients_sent=said.gradients_sent,
            steep=said.steep,
        )
    )
