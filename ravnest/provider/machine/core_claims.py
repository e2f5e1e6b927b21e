"""Core claims: how the providers of one machine notice each other and share its cores.

Each provider holds a locked file in a folder that all users of the machine can see. The system releases the lock when
the provider ends, for any reason, so a file that can be locked is left over. Providers look every few seconds, and
divide the cores again when a provider has come or gone.

If the folder cannot be used, a provider assumes that it is alone, and `--cores` sets its number of cores. Providers in
containers see each other only if they share the folder for temporary files.
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from ravnest import units
from ravnest.cores import fair_share

_FOLDER: Final = "ravnest-cores"
_MAX_CLAIMS: Final = 1024
_MAX_CLAIM_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """The cores that one provider on this machine uses."""

    name: str
    """Claims are sorted by name: the older one first."""
    cores: int | None
    """A number set by its user; None for a fair share."""


def share_of(mine: CoreRequest, others: Sequence[CoreRequest], cores: int) -> tuple[int, str]:
    """The number of cores for a provider, and the reason.

    Providers with a number of their own get it, and the others divide the rest.
    """
    of = f"of {units.counted(cores, 'core')}"
    if mine.cores is not None:
        return mine.cores, f"computing with {mine.cores} {of}, as requested"
    fair = sorted([mine, *(claim for claim in others if claim.cores is None)], key=lambda claim: claim.name)
    taken = sum(claim.cores or 0 for claim in others)
    share = fair_share(max(1, cores - taken), len(fair), fair.index(mine))
    if not others:
        return share, f"computing with {share} {of}"
    return share, f"computing with {share} {of}, which {len(others) + 1} providers on this machine share"


class CoreClaim:
    """This provider's claim, from `make` to `close` or the end of the process."""

    def __init__(self, folder: Path, claim: CoreRequest, descriptor: int, is_told: bool) -> None:
        """Use `make`. With the descriptor -1, only this process knows the claim."""
        self.claim = claim
        self.is_told = is_told
        """Whether the user is told the result: not if OMP_NUM_THREADS sets it."""
        self._folder = folder
        self._descriptor = descriptor

    @classmethod
    def make(cls, cores: int | None, folder: Path | None = None) -> Self:
        """Claim this many cores for all to see. None: the number in OMP_NUM_THREADS, or else a fair share."""
        folder = folder or Path(tempfile.gettempdir()) / _FOLDER
        is_told = cores is not None or not _threads_of_environment()
        cores = cores or _threads_of_environment()
        claim = CoreRequest(f"{time.time_ns():020}-{os.getpid()}", cores)
        try:
            return cls(folder, claim, _locked_file(folder, claim), is_told)
        except OSError:
            return cls(folder, claim, -1, is_told)

    def share(self, cores: int) -> tuple[int, str]:
        """The number of cores to use now, and the reason."""
        return share_of(self.claim, list(self._others()), cores)

    def close(self) -> None:
        """Leave the cores to the other providers; idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                (self._folder / self.claim.name).unlink()
            os.close(self._descriptor)
            self._descriptor = -1

    def _others(self) -> Iterator[CoreRequest]:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._folder))[:_MAX_CLAIMS]:
                if name != self.claim.name and not name.startswith("."):
                    with contextlib.suppress(OSError, ValueError, AttributeError):
                        claim = _live(self._folder, name)
                        if claim is not None:
                            yield claim


def _threads_of_environment() -> int | None:
    """The number in OMP_NUM_THREADS, which torch uses; None if it is not set."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else None


def _locked_file(folder: Path, claim: CoreRequest) -> int:
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        # As for the folder of temporary files: every user may add files, and remove only their own.
        folder.chmod(0o1777)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(str(folder))
    # Hidden until it is locked, because an unlocked file would count as left over.
    hidden = folder / f".{claim.name}"
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps({"cores": claim.cores}).encode())
        hidden.rename(folder / claim.name)
    except BaseException:
        os.close(descriptor)
        hidden.unlink(missing_ok=True)
        raise
    return descriptor


def _live(folder: Path, name: str) -> CoreRequest | None:
    """The claim in this file; None if its provider has ended, and the file is deleted then."""
    # O_NONBLOCK, so that opening a pipe does not block.
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        cores = json.loads(os.read(descriptor, _MAX_CLAIM_BYTES)).get("cores")
        return CoreRequest(name, cores if isinstance(cores, int) and cores > 0 else None)
    else:
        (folder / name).unlink()
        return None
    finally:
        os.close(descriptor)
