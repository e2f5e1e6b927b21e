"""`ravnest join` on a machine where something is in the way."""

import re
import socket
from pathlib import Path

import pytest
import torch

from ravnest.errors import PeerError
from ravnest.provider.device import choose_device
from ravnest.provider.memory import available_bytes, peak_bytes, resident_bytes
from tests.e2e.command import ravnest


def test_a_port_that_is_taken_and_a_coordinator_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ravnest("join", "ravnest://127.0.0.1:9/#abcdefgh", "--listen", f"127.0.0.1:{port}", folder=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(rf"ravnest: error: .*127\.0\.0\.1:{port}.*\n", done.stderr), done.stderr
    done = ravnest("join", "ravnest://127.0.0.1:9/#abcdefgh", folder=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"ravnest: error: cannot reach the coordinator at 127\.0\.0\.1:9: .*\n", done.stderr)


def test_a_device_that_is_not_here_says_what_to_use() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for wanted in ("cuda:77", "toaster"):
        with pytest.raises(PeerError, match="cannot be used here .*; use --device cpu or --device auto"):
            choose_device(wanted)


def test_memory_is_what_the_system_counts() -> None:
    cpu = torch.device("cpu")
    assert 0 < resident_bytes() <= peak_bytes(cpu)
    assert available_bytes(cpu) > 0
