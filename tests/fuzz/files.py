"""Files for decoders that read a path."""

import os
import tempfile
from functools import cache
from pathlib import Path


class File:
    """A file of this name with these bytes, in a folder of its own that is reused."""

    def __init__(self, name: str, data: bytes) -> None:
        self._path = _folder(name.partition("/")[0] if "/" in name else name) / name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.parent.chmod(0o700)
        self._path.write_bytes(data)
        self._path.chmod(0o600)

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, *_: object) -> None:
        self._path.unlink()


@cache
def _made_folder(process: int, name: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ravnest-fuzz-")


def _folder(name: str) -> Path:
    return Path(_made_folder(os.getpid(), name).name)
