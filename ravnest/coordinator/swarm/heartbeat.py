"""Heartbeat of a provider, and the timeout of its connection."""

from typing import Final

HEARTBEAT_SECONDS: Final = 1.0
"""A provider sends something at least this often."""

RECONNECT_SECONDS: Final = 30.0
"""Timeout for a provider without a connection to connect again; its session then ends."""
