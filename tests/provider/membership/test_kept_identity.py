"""A provider is the same node when it comes back, and several on one machine are several nodes."""

import os
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from ravnest.coordinator.access.admission import Admission
from ravnest.errors import RunError
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.provider.membership.joining import kept_identity


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def joined(swarm: Admission, node: NodeIdentity, invite: SwarmInvite, name: str) -> str:
    admitted = swarm.join(Identity("invite", invite.token.id), node.request(), name)
    return node.adopt(admitted.certificate, swarm.authority.certificate)


def test_a_provider_that_comes_back_is_the_same_node(data: Path) -> None:
    swarm = Admission.in_memory()
    invite, authority = swarm.invite("127.0.0.1", 1), swarm.authority.certificate
    with kept_identity(invite, authority, "Anna's PC") as node:
        assert not node.joined and joined(swarm, node, invite, "Anna's PC") == "anna-s-pc"
    with kept_identity(swarm.invite("127.0.0.1", 1), authority, "Anna's PC") as again:
        assert again.node_id == "anna-s-pc" and again.tls_keys() == node.tls_keys()
    with kept_identity(invite, authority, "another name") as other:
        assert not other.joined
    private = list((data / "ravnest").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in private if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in private if "anna" in path.name} == {0o700}


def test_what_is_kept_for_one_swarm_is_not_shown_to_another(data: Path) -> None:
    one, other = Admission.in_memory(), Admission.in_memory()
    invite = one.invite("127.0.0.1", 1)
    with kept_identity(invite, one.authority.certificate, "anna") as node:
        joined(one, node, invite, "anna")
    with kept_identity(other.invite("127.0.0.1", 1), other.authority.certificate, "anna") as stranger:
        assert not stranger.joined and stranger.tls_keys().key != node.tls_keys().key


def test_several_providers_on_one_machine_are_several_nodes(data: Path) -> None:
    swarm = Admission.in_memory()
    invite, authority = swarm.invite("127.0.0.1", 1), swarm.authority.certificate
    with ExitStack() as stack:
        first, second = (stack.enter_context(kept_identity(invite, authority, "pc")) for _ in range(2))
        names = {joined(swarm, node, invite, "pc") for node in (first, second)}
        assert names == {"pc", "pc-2"}
    with kept_identity(invite, authority, "pc") as again:
        assert again.node_id == "pc"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_cannot_be_written_is_named(data: Path) -> None:
    data.chmod(0o500)
    swarm = Admission.in_memory()
    invite = swarm.invite("127.0.0.1", 1)
    with pytest.raises(RunError, match="cannot use"), kept_identity(invite, swarm.authority.certificate, "anna"):
        pass


def test_without_a_data_folder_the_users_own_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    swarm = Admission.in_memory()
    with kept_identity(swarm.invite("127.0.0.1", 1), swarm.authority.certificate, "anna"):
        assert len(list((tmp_path / ".local/share/ravnest/nodes").glob("*/anna/node.key"))) == 1
