"""A token lets in as many as it should, as long as it should, and the store remembers whom."""

import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.access.invites import Token, TokenStore, admit
from ravnest.errors import PeerError, RunError

NOW = 1_800_000_000.0
GOOD = Token("ab12", uses_left=2, expires_at=NOW + 10, revoked_at=None, created_at=NOW, note="")


def changed(**fields: object) -> Token:
    return Token(**{**{name: getattr(GOOD, name) for name in Token.__slots__}, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("token", "good", "reason"),
    [
        (GOOD, True, "1 uses left"),
        (changed(uses_left=None, expires_at=None), True, "any number of uses"),
        (None, False, "not one of this swarm"),
        (changed(uses_left=0), False, "used up"),
        (changed(expires_at=NOW), False, "expired at 2027-01-15 08:00 UTC"),
        (changed(revoked_at=NOW - 1), False, "was revoked"),
        (changed(revoked_at=NOW - 1, uses_left=0, expires_at=0.0), False, "was revoked"),
    ],
)
def test_admission_is_decided_with_a_reason(token: Token | None, good: bool, reason: str) -> None:
    decision, words = admit(token, NOW)
    assert decision is good and reason in words
    assert good or "ask the requester for a new invite" in words


def test_a_node_that_returns_needs_no_use_but_a_live_token() -> None:
    assert admit(changed(uses_left=0), NOW, returning=True)[0]
    assert not admit(changed(uses_left=0, revoked_at=1.0), NOW, returning=True)[0]
    assert not admit(changed(expires_at=NOW - 1), NOW, returning=True)[0]


@given(uses=st.integers(0, 5), keys=st.lists(st.integers(0, 7).map(str), max_size=20))
def test_a_token_never_lets_in_more_keys_than_it_has_uses(uses: int, keys: list[str]) -> None:
    store = TokenStore()
    token = store.create(NOW, uses=uses)
    given_ids: dict[str, str] = {}
    for key in keys:
        try:
            node = store.redeem(token.id, key, "pc", NOW)
        except PeerError:
            assert len(given_ids) == uses and key not in given_ids
        else:
            assert given_ids.setdefault(key, node) == node
    assert len(set(given_ids.values())) == len(given_ids) <= uses
    store.close()


def test_what_the_store_knows_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = TokenStore(path)
    token = store.create(NOW, uses=1, note="for Anna")
    root = store.root(token.id)
    node = store.redeem(token.id, "key", "Anna", NOW)
    store.close()
    again = TokenStore(path)
    assert [(t.id, t.uses_left, t.note) for t in again.tokens()] == [(token.id, 0, "for Anna")]
    assert again.root(token.id) == root and again.live_roots(NOW) == [root]
    assert again.redeem(token.id, "key", "Anna", NOW) == node == "anna"
    again.close()


def test_another_process_that_revokes_or_throws_out_is_heard_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    running, command = TokenStore(path), TokenStore(path)
    token = running.create(NOW)
    node = running.redeem(token.id, "key", "anna", NOW)
    assert running.live_roots(NOW) and running.is_member(node)
    command.revoke(token.id, NOW)
    command.kick(node, NOW, "sent nonsense")
    assert running.live_roots(NOW) == [] and not running.is_member(node)
    made = command.create(NOW)
    assert running.live_roots(NOW) == [command.root(made.id)]
    running.close()
    command.close()


def test_two_who_race_for_the_last_use_do_not_both_get_it(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    stores = [TokenStore(path) for _ in range(4)]
    token = stores[0].create(NOW, uses=1)
    start = threading.Barrier(len(stores))
    outcomes: list[bool] = []

    def race(store: TokenStore, key: str) -> None:
        start.wait()
        try:
            outcomes.append(bool(store.redeem(token.id, key, "pc", NOW)))
        except PeerError:
            outcomes.append(False)

    threads = [threading.Thread(target=race, args=(store, str(n))) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False, False, False, True]
    for store in stores:
        store.close()


def test_a_token_expires_for_handshakes_and_stays_on_the_list() -> None:
    store = TokenStore()
    token = store.create(NOW, lifetime_seconds=60.0)
    assert len(store.live_roots(NOW + 59)) == 1
    assert store.live_roots(NOW + 60) == []
    assert [t.id for t in store.tokens()] == [token.id]
    with pytest.raises(PeerError, match="expired"):
        store.redeem(token.id, "key", "pc", NOW + 60)


def test_a_token_that_is_used_up_keeps_its_root_so_that_a_lost_reply_can_be_asked_for_again() -> None:
    store = TokenStore()
    token = store.create(NOW, uses=1)
    store.redeem(token.id, "key", "pc", NOW)
    assert len(store.live_roots(NOW)) == 1
    assert store.redeem(token.id, "key", "pc", NOW) == "pc"


def test_a_node_that_was_thrown_out_does_not_come_back_and_its_id_is_not_given_again() -> None:
    store = TokenStore()
    token = store.create(NOW)
    node = store.redeem(token.id, "key", "anna", NOW)
    store.kick(node, NOW)
    with pytest.raises(PeerError, match="anna was thrown out"):
        store.redeem(token.id, "key", "anna", NOW)
    assert store.redeem(token.id, "another key", "anna", NOW) == "anna-2"
    assert not store.is_member("nobody")


def test_what_is_not_there_can_be_neither_revoked_nor_thrown_out() -> None:
    store = TokenStore()
    with pytest.raises(RunError, match="no invite ab12"):
        store.revoke("ab12", NOW)
    with pytest.raises(RunError, match="no node anna"):
        store.kick("anna", NOW)


def test_the_store_holds_no_secret_and_is_private(tmp_path: Path) -> None:
    admission = Admission.open(tmp_path)
    invite = admission.invite("127.0.0.1", 7700)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            data = path.read_bytes()
            assert invite.token.secret not in data and invite.token.encode().encode() not in data
            assert invite.token.secret.hex().encode() not in data
    assert (tmp_path / "store.sqlite-wal").exists()
    admission.close()


def test_a_run_knows_its_swarm_again_after_a_restart(tmp_path: Path) -> None:
    first = Admission.open(tmp_path)
    invite = first.invite("127.0.0.1", 7700)
    first.close()
    second = Admission.open(tmp_path)
    assert second.authority.fingerprint == invite.fingerprint
    assert second.tokens.root(invite.token.id) is not None
    second.close()


def test_a_store_that_is_no_store_is_a_run_error(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"this is no database, " * 100)
    with pytest.raises(RunError, match=r"store\.sqlite cannot be used"):
        TokenStore(path)
    with pytest.raises(RunError, match="cannot be used"):
        TokenStore(tmp_path / "nowhere" / "store.sqlite")


def test_a_store_that_is_closed_is_a_run_error_and_not_a_crash() -> None:
    store = TokenStore()
    store.close()
    with pytest.raises(RunError, match="cannot be used"):
        store.live_roots(NOW)


def test_other_tables_of_the_store_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE members (node_id TEXT)")
        connection.execute("INSERT INTO members VALUES ('anna')")
    TokenStore(path).close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT node_id FROM members").fetchall() == [("anna",)]


def test_another_process_sees_the_address_the_nodes_and_who_was_thrown_out(tmp_path: Path) -> None:
    mine, other = TokenStore(tmp_path / "store.sqlite"), TokenStore(tmp_path / "store.sqlite")
    with pytest.raises(RunError, match="has never listened; start it with `ravnest serve`"):
        other.advertised()
    mine.advertise("203.0.113.5", 7700)
    mine.advertise("train.example.org", 7701)
    assert other.advertised() == ("train.example.org", 7701)
    token = mine.create(NOW)
    for number in (1, 2):
        mine.redeem(token.id, f"key-{number}", "anna", NOW + number)
    assert [(node.node_id, node.token_id, node.kicked_at) for node in other.nodes()] == [
        ("anna", token.id, None),
        ("anna-2", token.id, None),
    ]
    other.kick("anna-2", NOW + 5, "too slow")
    assert mine.kicked() == {"anna-2": "too slow"} and mine.nodes()[1].kicked_at == NOW + 5


def test_only_a_run_that_was_served_has_an_admission(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunError, match="has no invites: it was not begun with `ravnest serve`"):
        Admission.of_run(tmp_path)
    made = Admission.open(tmp_path)
    again = Admission.of_run(tmp_path)
    assert again.authority.fingerprint == made.authority.fingerprint
    made.close()
    again.close()
