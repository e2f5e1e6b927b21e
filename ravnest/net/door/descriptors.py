"""File descriptors: how many this process may have open, and raising that as far as the system lets it."""

import contextlib
import resource
from typing import Final

_MAX_WANTED: Final = 65_536


def raise_descriptor_limit() -> int:
    """Raises the soft limit towards the hard one; the limit that holds then.

    Many systems start a process with a soft limit of 1,024 (macOS: 256) and let it have far more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_WANTED if hard == resource.RLIM_INFINITY else min(hard, _MAX_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses more than a limit of its own.
        for limit in (wanted, 10_240):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, wanted), hard))
                break
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_WANTED if soft == resource.RLIM_INFINITY else soft
