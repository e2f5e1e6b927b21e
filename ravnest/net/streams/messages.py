"""Protobuf messages as bytes, with the same limit in both directions."""

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from ravnest.errors import PeerError, RefusedError

CONTROL_BYTES: Final = 16 << 20
"""Maximum size of a control message."""

MessageT = TypeVar("MessageT", bound=Message)


def message_bytes(message: Message, peer: str) -> bytes:
    """The message as bytes for this peer; PeerError when it is empty or too large."""
    data = message.SerializeToString()
    if not data or len(data) > CONTROL_BYTES:
        raise PeerError(
            f"a {type(message).__name__} of {len(data)} bytes cannot be sent to {peer}; "
            f"1 to {CONTROL_BYTES} are allowed"
        )
    return data


def read_message(kind: type[MessageT], data: bytes, peer: str) -> MessageT:
    """The message of this kind that the peer has sent; RefusedError when the bytes are none."""
    try:
        if len(data) > CONTROL_BYTES:
            raise ValueError(f"{len(data)} bytes are more than {CONTROL_BYTES}")
        message = kind()
        message.ParseFromString(data)
        return message
    except (DecodeError, ValueError) as error:
        raise RefusedError(f"{peer} sent a bad message: {error}") from None
