"""Files for keys, which only their owner may read: folders have mode 0700, files 0600."""

import os
import secrets
import stat
from pathlib import Path

from ravnest.errors import RunError


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can read, or restrict an existing one. RunError when that fails."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkdir's mode is limited by the umask, and has no effect on an existing folder.
        path.chmod(0o700)
    except OSError as error:
        raise _unusable(path, error) from None


def write_private(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, readable by this user only from its first byte. RunError on failure."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unusable(path, error) from None


def read_private(path: Path) -> bytes | None:
    """The bytes of such a file; None when there is none. RunError when others may read it, or it cannot be read."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise RunError(
                    f"{path} holds a secret and others on this machine may read it (mode {mode:04o}); "
                    f"run `chmod 600 {path}`, and make new invites if another user may have copied it"
                )
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot use {path}: {error.strerror or error}; check the folder's owner and the free space")
