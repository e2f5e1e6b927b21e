"""`ravnest doctor` over real sockets: whatever is in the way is found, named and given a fix."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.access.invites import TokenStore
from ravnest.coordinator.launch.network_loop import NetworkLoop
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.engine.speed.device_speed import Speed
from ravnest.net.identity.authority import SwarmAuthority
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.rpc.server import CoordinatorServer
from ravnest.provider.doctor import doctor
from ravnest.provider.doctor.checks import CheckResult
from ravnest.provider.doctor.doctor import DoctorOptions, examine
from ravnest.provider.membership.joining import kept_identity
from tests.e2e.command import ravnest

FIGURES = Speed(95e9, 30e9)


class Coordinator:
    """One that listens, on a loop of its own; its clock can be set."""

    def __init__(self, loop: NetworkLoop) -> None:
        self.ahead_seconds = 0.0
        self.admission = Admission(SwarmAuthority.new(), TokenStore(), lambda: time.time() + self.ahead_seconds)
        self.swarm = Swarm(self.admission)
        self.port = loop.call(self.swarm.start())

    def invite(self, **limits: float | None) -> SwarmInvite:
        return self.admission.invite("127.0.0.1", self.port, **limits)  # type: ignore[arg-type]

    def join(self, invite: SwarmInvite, name: str) -> None:
        """As `ravnest join` would: the identity is kept on this machine."""
        with kept_identity(invite, self.admission.authority.certificate, name) as node:
            admitted = self.admission.join(Identity("invite", invite.token.id), node.request(), name)
            node.adopt(admitted.certificate, self.admission.authority.certificate)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ravnest.provider.machine.speed_cache.measure_speed", lambda device, memory_bytes: FIGURES)
    # These settle how the whole process allocates; the other tests of this process are not to notice.
    monkeypatch.setattr("ravnest.provider.machine.torch_footprint.give_memory_back", lambda: None)
    monkeypatch.setattr("ravnest.provider.machine.torch_footprint.leave_out_the_compiler", lambda: None)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with NetworkLoop() as loop:
        made = Coordinator(loop)
        yield made
        loop.call(made.swarm.stop("the test is over"))


def look(invite: SwarmInvite | str | None = None, **wanted: object) -> dict[str, CheckResult]:
    """The findings by what they are about; none is told twice."""
    told: list[CheckResult] = []
    line = invite.line if isinstance(invite, SwarmInvite) else invite
    examine(DoctorOptions(line, **wanted), told.append)  # type: ignore[arg-type]
    found = {finding.check: finding for finding in told}
    assert len(found) == len(told)
    return found


def problem(found: dict[str, CheckResult], check: str, sentence: str, fix: str) -> None:
    """This is the only problem, in these words, and it has this fix."""
    assert [finding.check for finding in found.values() if finding.level == "problem"] == [check], found
    assert re.search(sentence, found[check].sentence), found[check]
    assert re.search(fix, found[check].fix), found[check]


LOCAL = ["python", "torch", "port", "device", "memory", "speed", "disk"]
REMOTE = ["name", "connection", "authority", "version", "clock", "invite", "link", "reach"]


def test_a_machine_that_is_well_can_join_and_the_invite_is_not_used_up(coordinator: Coordinator) -> None:
    invite = coordinator.invite(uses=1)
    found = look(invite)
    assert list(found) == LOCAL + REMOTE
    assert {finding.level for finding in found.values()} <= {"ok", "warning"}
    assert all(found[check].level == "ok" for check in ["authority", "version", "clock", "invite"])
    assert found["invite"].sentence == f"invite {invite.token.id} is good, with 0 uses left after this one"
    assert coordinator.admission.tokens.tokens()[-1].uses_left == 1
    assert coordinator.admission.tokens.nodes() == []


def test_without_an_invite_the_machine_alone_is_looked_at() -> None:
    assert list(look()) == LOCAL


def test_a_port_that_is_taken_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem(look(listen=("127.0.0.1", port)), "port", f"127.0.0.1:{port}: address already in use", "--listen")


def test_a_device_that_is_not_here_is_a_problem_and_the_rest_is_looked_at() -> None:
    found = look(device="cuda:77")
    problem(found, "device", "'cuda:77' cannot be used here", "use --device cpu or --device auto")
    assert "disk" in found and "speed" not in found


def test_a_device_that_fails_when_it_computes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: object, memory_bytes: int) -> Speed:
        raise RuntimeError("CUDA error: no kernel image\nmore")

    monkeypatch.setattr("ravnest.provider.machine.speed_cache.measure_speed", fail)
    problem(look(), "speed", "cpu fails when it computes: CUDA error: no kernel image$", "use another --device")


def test_too_little_memory_is_a_problem() -> None:
    problem(look(memory_bytes=1 << 20), "memory", "1 MiB of memory can be lent", "--memory")


def test_a_gpu_that_torch_does_not_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert look()["device"].level == "warning"
    assert look(device="cpu")["device"].level == "ok", "who asks for the processor gets it"


def test_a_folder_that_cannot_be_used_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    problem(look(), "disk", "cannot use .*file/ravnest", "check the folder's owner")


@pytest.mark.parametrize("line", ["nonsense", "ravnest://127.0.0.1:1/", "ravnest://127.0.0.1:1/#abc.def"])
def test_a_malformed_invite_is_a_problem_and_is_not_shown(line: str) -> None:
    found = look(line)
    problem(found, "invite", "the invite .*is malformed", "copy the whole line|quote the line")
    assert "abc" not in found["invite"].sentence


def test_a_host_that_has_no_address_is_a_problem(coordinator: Coordinator) -> None:
    found = look(replace(coordinator.invite(), host="no-such-host.invalid"))
    problem(found, "name", "there is no address for no-such-host.invalid", "check the address in the invite")
    assert "connection" not in found


def test_a_port_without_a_listener_is_a_problem(coordinator: Coordinator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = look(replace(coordinator.invite(), port=port))
    problem(found, "connection", f"cannot connect to 127.0.0.1:{port}: connection refused", "firewall and router")
    assert "authority" not in found


def test_an_address_that_does_not_answer_is_a_problem_soon(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CONNECT_SECONDS", 0.2)
    with ExitStack() as stack:
        # Connections are not accepted here: when their queue is full, the system lets callers wait.
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        found = look(replace(coordinator.invite(), port=full.getsockname()[1]))
    problem(found, "connection", r"cannot connect to \S+: no answer within 0.2 seconds", "firewall and router")


@contextmanager
def speaking(greeting: bytes) -> Iterator[int]:
    """The port of a server that does not speak TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(greeting)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(5)


def test_something_else_that_listens_there_is_a_problem(coordinator: Coordinator) -> None:
    with speaking(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        found = look(replace(coordinator.invite(), port=port))
    problem(found, "authority", "does not speak TLS 1.3", "check that the coordinator is running")


def test_another_swarm_at_that_address_is_a_problem(coordinator: Coordinator) -> None:
    found = look(replace(coordinator.invite(), fingerprint=bytes(32)))
    problem(found, "authority", "is not the swarm the invite is for", "ask the requester for a new invite")
    assert "invite" not in found, "the invite was shown to a stranger"


def test_an_expired_invite_is_a_problem(coordinator: Coordinator) -> None:
    invite = coordinator.invite(lifetime_seconds=60)
    coordinator.ahead_seconds = 61
    problem(look(invite), "invite", "does not accept this invite: it has expired", "ask the requester for a new")


def test_a_revoked_invite_is_a_problem(coordinator: Coordinator) -> None:
    invite = coordinator.invite()
    coordinator.admission.tokens.revoke(invite.token.id, time.time())
    problem(look(invite), "invite", "was revoked", "ask the requester for a new invite")


def test_an_invite_that_is_used_up_is_a_problem_unless_this_machine_used_it(coordinator: Coordinator) -> None:
    invite = coordinator.invite(uses=1)
    coordinator.admission.tokens.redeem(invite.token.id, "another key", "ben", time.time())
    problem(look(invite), "invite", f"the invite {invite.token.id} has been used up", "ask the requester")
    once = coordinator.invite(uses=1)
    coordinator.join(once, "anna")
    found = look(once)
    assert found["invite"].level == "warning" and "joined as anna before and may come back" in found["invite"].sentence
    assert found["link"].level == "ok", "the way is measured with the certificate instead"


def test_an_invite_of_another_swarm_at_the_same_address_is_a_problem(coordinator: Coordinator) -> None:
    elsewhere = Admission.in_memory().invite("127.0.0.1", coordinator.port)
    found = look(replace(coordinator.invite(), token=elsewhere.token))
    problem(found, "invite", "does not accept this invite: .* is another swarm's", "ask the requester")


def test_a_machine_that_was_thrown_out_is_told(coordinator: Coordinator) -> None:
    invite = coordinator.invite()
    coordinator.join(invite, "anna")
    assert look(invite)["invite"].level == "ok"
    coordinator.admission.tokens.kick("anna", time.time())
    problem(look(invite), "identity", "anna was thrown out of the swarm", "ask the requester for a new invite")


@pytest.mark.parametrize("which", ["PROTOCOL_VERSION", "FORMAT_VERSION"])
def test_a_coordinator_of_another_version_is_a_problem(
    coordinator: Coordinator, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"ravnest.coordinator.swarm.swarm.{which}", 99)
    monkeypatch.setattr("ravnest.coordinator.swarm.swarm.__version__", "9.9")
    found = look(coordinator.invite())
    problem(found, "version", r"the coordinator 9\.9 \(.*99", "update the older one")


def test_a_coordinator_that_cannot_be_asked_is_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = CoordinatorServer.methods
    monkeypatch.setattr(
        CoordinatorServer, "methods", lambda self: {k: v for k, v in methods(self).items() if k not in ("Check",)}
    )
    with NetworkLoop() as loop:
        old = Coordinator(loop)
        problem(look(old.invite()), "version", "does not know this call", "the same version of ravnest on both sides")
        loop.call(old.swarm.stop("the test is over"))


@pytest.mark.parametrize(("ahead", "level"), [(0, "ok"), (3600, "warning"), (-23 * 3600, "problem")])
def test_a_clock_that_is_wrong_is_told(
    coordinator: Coordinator, ahead: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ravnest.coordinator.swarm.swarm.time", SimpleNamespace(time=lambda: time.time() + ahead))
    found = look(coordinator.invite())
    assert found["clock"].level == level, found["clock"]
    assert level == "ok" or "let the clock be set" in found["clock"].fix


def test_a_connection_that_cannot_be_measured_is_no_problem(coordinator: Coordinator) -> None:
    invite = coordinator.invite()
    for _ in range(6):
        assert look(invite)["link"].level == "ok"
    found = look(invite)
    assert found["link"].level == "warning" and found["link"].fix == "try again in a minute"
    assert "has measured 6 times within a minute" in found["link"].sentence


def test_the_coordinator_dials_back_to_see_whether_this_machine_can_be_reached(coordinator: Coordinator) -> None:
    reach = look(coordinator.invite(), listen=("127.0.0.1", 0))["reach"]
    assert reach.level == "ok" and "can dial this machine at 127.0.0.1, port " in reach.sentence


def test_a_machine_that_cannot_be_dialled_is_told_what_follows(coordinator: Coordinator) -> None:
    # It listens where the coordinator does not look. Behind a router, too, the port is open but cannot be reached.
    reach = look(coordinator.invite(), listen=("127.0.0.9", 0))["reach"]
    assert reach.level == "warning" and "cannot dial this machine at 127.0.0.1: " in reach.sentence
    assert "relay" in reach.fix


def test_something_else_on_that_port_is_not_taken_for_this_machine(coordinator: Coordinator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-other"), daemon=True).start()
        reach = look(coordinator.invite(), listen=("127.0.0.9", other.getsockname()[1]))["reach"]
    assert reach.level == "warning" and "something else answers there" in reach.sentence


def test_without_a_torch_that_loads_that_is_all_that_is_said(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from ravnest.cli.main import main\n"
        "code = main(['doctor', 'ravnest://127.0.0.1:1/#x.y'])\n"
        "assert 'grpc' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
    assert re.search(r"^problem  torch       PyTorch \S+ cannot be loaded", done.stdout, re.M), done.stdout
    assert done.stdout.endswith("\n1 problem, 0 warnings\n")


def test_the_command_prints_sentences_or_json_and_exits_with_what_it_found(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    invite = coordinator.invite()
    well = ravnest("doctor", invite.line, "--json", folder=tmp_path, warm=True)
    told = json.loads(well.stdout)
    assert (well.returncode, well.stderr, told["problems"]) == (0, "", 0)
    assert [finding["check"] for finding in told["findings"]] == LOCAL + REMOTE
    assert invite.token.encode() not in well.stdout

    coordinator.admission.tokens.revoke(invite.token.id, time.time())
    ill = ravnest("doctor", invite.line, folder=tmp_path, warm=True)
    assert (ill.returncode, ill.stderr) == (2, "")
    assert re.search(r"^ok       python      Python 3\.\d+$", ill.stdout, re.M), ill.stdout
    assert re.search(r"^problem  invite      .* does not accept .*\n {20} fix: ask the requester", ill.stdout, re.M)
    assert re.search(r"\n1 problem, (no|\d+) warnings?\n$", ill.stdout), ill.stdout
    assert "\x1b" not in ill.stdout and invite.token.encode() not in ill.stdout
