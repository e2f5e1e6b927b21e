"""Version of the messages and frames that two nodes exchange."""

from typing import Final

PROTOCOL_VERSION: Final = 7
