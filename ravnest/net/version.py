"""The version of the messages and frames two nodes exchange."""

from typing import Final

PROTOCOL_VERSION: Final = 7
