"""Control connection to a running switch, for a lab or a second terminal: one line of JSON per request and answer."""

import json
import socket
import threading
from pathlib import Path
from typing import Any, Final

from tests.wan.namespaces import RUNNING, LabError

_ANSWER_SECONDS: Final = 30.0


def socket_path(lab: str) -> Path:
    return RUNNING / lab / "control.sock"


def running_labs() -> list[str]:
    """The names of the labs on this machine that have a switch."""
    return sorted(path.parent.name for path in RUNNING.glob("*/control.sock"))


class Control:
    """A connection to a lab's switch; any thread may use it."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_ANSWER_SECONDS)
        try:
            self._socket.connect(str(socket_path(lab)))
        except OSError as error:
            self._socket.close()
            raise LabError(f"the switch of lab {lab} cannot be reached: {error}") from error
        self._lines = self._socket.makefile("rb")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns the answer. ValueError: the switch refuses; LabError: it is gone."""
        with self._lock:
            try:
                self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
                line = self._lines.readline()
            except OSError as error:
                raise LabError(f"the switch of lab {self._lab} does not answer: {error}") from error
        if not line:
            raise LabError(f"the switch of lab {self._lab} has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
