"""File descriptors: the number that this process may have open, raised as far as the system allows."""

import contextlib
import resource
from typing import Final

_MAX_WANTED: Final = 65_536


def raise_descriptor_limit() -> int:
    """Raise the soft limit towards the hard one. Returns the limit that holds afterwards.

    Many systems start a process with a soft limit of 1,024 (macOS: 256) and allow far more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_WANTED if hard == resource.RLIM_INFINITY else min(hard, _MAX_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has another, lower limit.
        for limit in (wanted, 10_240):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, wanted), hard))
                break
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_WANTED if soft == resource.RLIM_INFINITY else soft
