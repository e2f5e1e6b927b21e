"""Over real sockets: who gets through the handshake, who may call what, and what the others are told."""

import asyncio
import logging
import ssl
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc import aio

from ravnest.errors import PeerError
from ravnest.net.identity import certificates
from ravnest.net.identity.authority import SwarmAuthority
from ravnest.net.identity.identity import COORDINATOR_HOST, node_host
from ravnest.net.identity.invite_key import InviteToken
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.identity.tls import TlsKeys, expecting, server_credentials, tls_failure
from ravnest.net.rpc.first_contact import pin_authority
from tests.net.secure_ends import (
    call,
    call_on,
    join,
    link,
    listening_node,
    plain_server,
    run,
    secure_coordinator,
    serving,
)

DAY_SECONDS = 86400.0


def test_a_provider_with_a_good_invite_joins_and_works_under_the_id_it_was_given() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            node = await join(coordinator.invite())
            assert node.node_id == "anna-s-pc"
            assert await call(coordinator.address, node.tls_keys(), "Work") == b"anna-s-pc"

    run(test())


def test_an_invite_made_while_the_coordinator_runs_counts_at_once() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            first = await join(coordinator.invite())
            second = await join(coordinator.invite())
            assert (first.node_id, second.node_id) == ("anna-s-pc", "anna-s-pc-2")

    run(test())


def test_a_repeated_join_gets_the_same_id_and_does_not_use_the_invite_up() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite(uses=1)
            node = await join(invite)
            assert (await join(invite, node)).node_id == node.node_id
            assert coordinator.admission.tokens.tokens()[0].uses_left == 0

    run(test())


def test_an_invite_that_is_used_up_says_so() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite(uses=1)
            await join(invite)
            with pytest.raises(PeerError, match=f"the invite {invite.token.id} has been used up"):
                await join(invite)

    run(test())


def test_a_caller_without_a_certificate_reaches_no_call() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            root = certificates.certificate_pem(coordinator.admission.authority.certificate)
            bare = grpc.ssl_channel_credentials(root)
            channel = aio.secure_channel(coordinator.address, bare, options=expecting(COORDINATOR_HOST))
            with pytest.raises(PeerError, match="does not accept what this test showed"):
                await call_on(channel, coordinator.address, "Join")
            assert coordinator.calls == 0

    run(test())


@pytest.mark.parametrize("secret_of", ["no token", "another token"])
def test_an_unknown_token_reaches_no_call(secret_of: str) -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            known = coordinator.invite()
            token = InviteToken.new()
            if secret_of == "another token":
                token = InviteToken(known.token.id, token.secret)
            with pytest.raises(PeerError, match="does not accept"):
                await join(replace(known, token=token))
            assert coordinator.calls == 0

    run(test())


def test_an_expired_invite_is_refused_from_the_next_handshake_on() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite(lifetime_seconds=DAY_SECONDS)
            await join(invite)
            coordinator.clock.now += DAY_SECONDS + 1
            with pytest.raises(PeerError, match="it has expired, was revoked, or is another swarm's"):
                await join(invite)
            assert coordinator.calls == 1

    run(test())


def test_a_revoked_invite_is_refused_from_the_next_handshake_on_and_its_nodes_stay() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite, other = coordinator.invite(), coordinator.invite()
            node = await join(invite)
            coordinator.admission.tokens.revoke(invite.token.id, coordinator.clock())
            with pytest.raises(PeerError, match="ask the requester for a new invite"):
                await join(invite)
            assert coordinator.calls == 1
            assert await call(coordinator.address, node.tls_keys(), "Work") == b"anna-s-pc"
            await join(other)

    run(test())


def test_a_node_of_another_swarm_reaches_no_call() -> None:
    async def test() -> None:
        async with secure_coordinator() as ours, secure_coordinator() as theirs:
            stranger = await join(theirs.invite())
            keys = replace(stranger.tls_keys(), roots=ours.admission.authority.tls_keys().roots)
            with pytest.raises(PeerError, match="does not accept what this test showed"):
                await call(ours.address, keys, "Work")
            assert ours.calls == 0
            with pytest.raises(PeerError, match="does not belong to this swarm"):
                await call(ours.address, stranger.tls_keys(), "Work")

    run(test())


def test_a_node_cannot_join_again_and_an_invite_cannot_work() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite()
            node = await join(invite)
            with pytest.raises(PeerError, match="may not call Join: the holder of an invite may, anna-s-pc is a node"):
                await call(coordinator.address, node.tls_keys(), "Join", node.request())
            keys = joiner_keys(invite.token, coordinator.admission.authority.certificate)
            with pytest.raises(PeerError, match="may not call Work: an invite is only for joining"):
                await call(coordinator.address, keys, "Work")

    run(test())


@pytest.mark.parametrize("name", ["node:anna-s-pc", "coordinator", "invite:000000000000"])
def test_an_invite_used_to_sign_another_name_gets_through_no_call(name: str) -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite()
            await join(invite)
            key = certificates.new_key()
            root = invite.token.root(time.time())
            forged = certificates.leaf_certificate(
                key.public_key(), name, root.subject, invite.token.root_key(), timedelta(days=1), time.time()
            )
            roots = coordinator.admission.authority.tls_keys().roots
            keys = TlsKeys(certificates.key_pem(key), certificates.certificate_pem(forged), roots)
            for method in ("Work", "Join"):
                with pytest.raises(PeerError, match="not one of this swarm"):
                    await call(coordinator.address, keys, method, NodeIdentity.new().request())

    run(test())


def test_a_node_that_was_thrown_out_may_neither_call_nor_come_back() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite()
            node = await join(invite)
            coordinator.admission.tokens.kick(node.node_id, coordinator.clock(), "sent nonsense")
            with pytest.raises(PeerError, match="anna-s-pc was thrown out of the swarm"):
                await call(coordinator.address, node.tls_keys(), "Work")
            with pytest.raises(PeerError, match="anna-s-pc was thrown out of the swarm"):
                await join(invite, node)

    run(test())


def test_two_nodes_link_and_each_knows_the_other() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            authority = coordinator.admission.authority.certificate
            earlier, later = await join(coordinator.invite()), await join(coordinator.invite())
            async with listening_node(later, authority) as address:
                assert await link(address, earlier, later.node_id) == earlier.node_id
                with pytest.raises(PeerError, match="another node of this swarm than the one expected"):
                    await link(address, earlier, "another-node")

    run(test())


def test_the_coordinator_can_dial_a_node_that_listens() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            authority = coordinator.admission.authority
            node = await join(coordinator.invite())
            async with listening_node(node, authority.certificate) as address:
                reply = await call(address, authority.tls_keys(), "Link", host=node_host(node.node_id))
                assert reply == b"coordinator"

    run(test())


def test_a_node_cannot_pose_as_the_coordinator() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            poser, victim = await join(coordinator.invite()), await join(coordinator.invite())
            async with listening_node(poser, coordinator.admission.authority.certificate) as address:
                with pytest.raises(PeerError, match="another node of this swarm than the one expected"):
                    await call(address, victim.tls_keys(), "Join")

    run(test())


def test_an_invite_cannot_link_to_a_node() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite()
            node = await join(invite)
            authority = coordinator.admission.authority.certificate
            async with listening_node(node, authority) as address:
                with pytest.raises(PeerError, match="does not accept"):
                    await call(address, joiner_keys(invite.token, authority), "Link", host=node_host(node.node_id))

    run(test())


def test_a_node_listens_before_it_has_joined_and_lets_callers_in_once_it_has() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            authority = coordinator.admission.authority.certificate
            caller, late = await join(coordinator.invite()), NodeIdentity.new()
            async with listening_node(late, authority) as address:
                with pytest.raises(PeerError, match="does not belong to this swarm"):
                    await link(address, caller, "late")
                await join(coordinator.invite(), late)
                assert await link(address, caller, late.node_id) == caller.node_id

    run(test())


def test_a_node_renews_its_certificate_under_its_own_id_alone() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            node = await join(coordinator.invite())
            before = node.expires_at
            coordinator.clock.now += DAY_SECONDS
            identity = coordinator.admission.caller({"x509_pem_cert": [node.tls_keys().certificate]}, ["node"], "Renew")
            renewed = coordinator.admission.join(identity, node.request(), "another-node")
            node.adopt(renewed.certificate, coordinator.admission.authority.certificate)
            assert renewed.node_id == node.node_id == "anna-s-pc" and node.expires_at > before

    run(test())


def test_the_wrong_swarm_is_recognised_before_anything_is_sent_to_it() -> None:
    async def test() -> None:
        async with secure_coordinator() as ours, secure_coordinator() as theirs:
            invite = replace(ours.invite(), port=theirs.port)
            with pytest.raises(PeerError, match="is not the swarm the invite is for; nothing was sent"):
                await join(invite)
            assert theirs.calls == 0

    run(test())


def test_the_first_contact_shows_no_certificate_and_sends_not_a_byte(tmp_path: Path) -> None:
    swarm = SwarmAuthority.open(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "authority.pem")
    context.verify_mode = ssl.CERT_OPTIONAL

    async def test() -> None:
        met: asyncio.Future[tuple[object, bytes]] = asyncio.get_running_loop().create_future()

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                sent = await reader.read()
            except ConnectionError:
                sent = b""
            met.set_result((writer.get_extra_info("peercert"), sent))
            writer.close()

        server = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await pin_authority(SwarmInvite("127.0.0.1", port, InviteToken.new(), swarm.fingerprint))
            shown, sent = await met
        assert not shown and not sent

    run(test())


def test_a_server_that_does_not_speak_tls_is_named() -> None:
    async def test() -> None:
        for greeting in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00" * 64):
            async with plain_server(greeting) as port:
                with pytest.raises(PeerError, match="does not speak TLS"):
                    await pin_authority(_invite_to(port))

    run(test())


def test_a_server_that_never_answers_is_given_up() -> None:
    async def test() -> None:
        async with plain_server(b"", hang=True) as port:
            with pytest.raises(PeerError, match=r"did not answer within 0\.05 seconds"):
                await pin_authority(_invite_to(port), timeout_seconds=0.05)

    run(test())


def test_an_address_without_a_listener_is_unreachable() -> None:
    async def test() -> None:
        async with plain_server(b"") as port:
            pass
        with pytest.raises(PeerError, match="cannot reach the coordinator at"):
            await pin_authority(_invite_to(port))

    run(test())


def test_a_clock_that_is_wrong_by_years_is_named() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            with pytest.raises(PeerError, match="set the clock right"):
                await pin_authority(coordinator.invite(), now=0.0)

    run(test())


def test_a_clock_that_is_wrong_by_hours_does_no_harm() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite()
            for hours in (-20, 20):
                authority = await pin_authority(invite, now=time.time() + hours * 3600)
                keys = joiner_keys(invite.token, authority, now=time.time() + hours * 3600)
                await call(invite.address, keys, "Join", NodeIdentity.new().request())

    run(test())


def test_no_secret_is_logged_or_told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    sentences: list[str] = []

    async def test() -> None:
        async with secure_coordinator() as coordinator:
            invite = coordinator.invite(uses=1)
            tokens.append(invite.token)
            await join(invite)
            for broken in (invite, replace(invite, token=InviteToken.new()), replace(invite, fingerprint=bytes(32))):
                tokens.append(broken.token)
                with pytest.raises(PeerError) as caught:
                    await join(broken)
                sentences.append(str(caught.value))

    tokens: list[InviteToken] = []
    with caplog.at_level(logging.DEBUG):
        run(test())
    output = capfd.readouterr()
    said = "\n".join([*sentences, caplog.text, output.out, output.err])
    assert len(sentences) == 3
    for token in tokens:
        assert token.encode() not in said and token.secret.hex() not in said and repr(token.secret) not in said
    assert "PRIVATE KEY" not in said


def test_a_server_whose_keys_cannot_be_read_goes_on_with_the_last_ones() -> None:
    async def test() -> None:
        async with secure_coordinator() as coordinator:
            earlier, later = await join(coordinator.invite()), await join(coordinator.invite())
            reads = 0

            def keys() -> TlsKeys:
                nonlocal reads
                reads += 1
                if reads > 2:
                    raise OSError("the disk is gone")
                return later.tls_keys()

            async def who(request: bytes, context: object) -> bytes:
                return b"still here"

            async with serving({"Link": who}, server_credentials(keys)) as port:
                for _ in range(3):
                    assert await link(f"127.0.0.1:{port}", earlier, later.node_id) == "still here"
            assert reads > 2

    run(test())


def test_an_ordinary_failure_is_not_blamed_on_tls() -> None:
    assert tls_failure("x", "this invite", "failed to connect to all addresses; Connection refused (111)") is None
    assert tls_failure("x", "this invite", None) is None


def _invite_to(port: int) -> SwarmInvite:
    return SwarmInvite("127.0.0.1", port, InviteToken.new(), SwarmAuthority.new().fingerprint)
