"""`ravnest join` on a machine where something is in the way."""

import re
import socket
from pathlib import Path

import pytest
import torch

from ravnest.errors import PeerError
from ravnest.net.invite_key import InviteToken
from ravnest.net.swarm_invite import SwarmInvite
from ravnest.provider.device import choose_device
from ravnest.provider.memory import available_bytes, peak_bytes, resident_bytes
from tests.e2e.command import ravnest


def test_a_coordinator_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    invite = SwarmInvite("127.0.0.1", port, InviteToken.new(), bytes(32)).line
    done = ravnest("join", invite, folder=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(rf"ravnest: error: cannot reach .*127\.0\.0\.1:{port}.*\n", done.stderr), done.stderr


def test_a_device_that_is_not_here_says_what_to_use() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for wanted in ("cuda:77", "toaster"):
        with pytest.raises(PeerError, match=r"cannot be used here .*; use --device cpu or --device auto"):
            choose_device(wanted)


def test_memory_is_what_the_system_counts() -> None:
    cpu = torch.device("cpu")
    assert 0 < resident_bytes() <= peak_bytes(cpu)
    assert available_bytes(cpu) > 0
