"""JSON lines files: several threads append objects while other programs read."""

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ravnest.monitor.files import read_error, write_error
from ravnest.safe_json import read_json


class JsonLines:
    """Appends strict JSON lines to the file at `path`; each line is visible to readers when `append` returns.

    - A line truncated by an earlier crash is removed when the file is opened, so that later lines stay readable.
    - If the disk fails, the first `append` raises RunError and removes the partly written line; later calls retry
      without raising, so that a failing log does not prevent a clean shutdown.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._failed = False
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._size = _whole_lines_bytes(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            raise write_error(path, error) from error
        self._closed = False

    def append(self, record: Mapping[str, object]) -> None:
        """Writes one line; does nothing after `close`."""
        line = json.dumps(strict(record), allow_nan=False, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            if self._closed:
                return
            try:
                written = os.write(self._descriptor, line)
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
                self._size += len(line)
                self._failed = False
            except OSError as error:
                os.ftruncate(self._descriptor, self._size)
                if not self._failed:
                    self._failed = True
                    raise write_error(self._path, error) from error

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, oldest first. Truncated lines are skipped; a missing file has no lines."""
    try:
        with open(path, "rb") as file:
            for line in file:
                record = _parsed(line)
                if record is not None:
                    yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise read_error(path, error) from error


def strict(value: object) -> Any:
    """The same plain value, with None for the numbers that JSON does not have (NaN and the infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = read_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _whole_lines_bytes(descriptor: int) -> int:
    """The size of the file up to and including its last newline."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
