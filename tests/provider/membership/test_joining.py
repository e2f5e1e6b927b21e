"""`ravnest join` on a machine where something is in the way."""

import re
import socket
from pathlib import Path

from ravnest.net.identity.invite_key import InviteToken
from ravnest.net.identity.swarm_invite import SwarmInvite
from tests.e2e.command import ravnest


def test_a_coordinator_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    invite = SwarmInvite("127.0.0.1", port, InviteToken.new(), bytes(32)).line
    done = ravnest("join", invite, folder=tmp_path, warm=True)
    assert done.returncode == 2
    assert re.fullmatch(rf"ravnest: error: cannot reach .*127\.0\.0\.1:{port}.*\n", done.stderr), done.stderr
