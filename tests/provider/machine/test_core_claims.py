"""Providers on one machine notice each other and share its cores."""

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ravnest.provider.machine.core_claims import CoreClaim, CoreRequest, share_of

HOLD = """
import sys
from pathlib import Path
from ravnest.provider.machine.core_claims import CoreClaim
claim = CoreClaim.make(None, Path(sys.argv[1]))
print(claim.claim.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_number_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("mine", "others", "cores", "expected"),
    [
        (None, [], 8, 8),
        (None, [None], 8, 4),
        (None, [None, None], 8, 2),
        (None, [None, None], 2, 1),
        (None, [6], 8, 2),
        (None, [6, None], 8, 1),
        (None, [8], 8, 1),
        (None, [64], 8, 1),
        (3, [None, 7], 8, 3),
    ],
)
def test_who_asked_for_a_number_gets_it_and_the_rest_is_shared(
    mine: int | None, others: Sequence[int | None], cores: int, expected: int
) -> None:
    claims = [CoreRequest(f"{number}", wanted) for number, wanted in enumerate(others)]
    assert share_of(CoreRequest("9", mine), claims, cores)[0] == expected


def test_what_does_not_divide_goes_to_who_came_first() -> None:
    claims = [CoreRequest(name, None) for name in "abc"]
    shares = [share_of(claim, [other for other in claims if other != claim], 8)[0] for claim in claims]
    assert shares == [3, 3, 2]
    assert (
        share_of(claims[0], claims[1:], 8)[1] == "computing with 3 of 8 cores, which 3 providers on this machine share"
    )


def test_a_second_provider_halves_the_share_and_its_end_gives_it_back(tmp_path: Path) -> None:
    mine = CoreClaim.make(None, tmp_path / "cores")
    assert mine.share(4) == (4, "computing with 4 of 4 cores")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "cores")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdin is not None
    name = other.stdout.readline().decode().strip()
    assert mine.share(4)[0] == 2
    # However it ends: it had no time to tidy up.
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    assert (tmp_path / "cores" / name).exists()
    assert mine.share(4)[0] == 4
    assert not (tmp_path / "cores" / name).exists()
    mine.close()
    assert list((tmp_path / "cores").iterdir()) == []


def test_every_user_of_the_machine_may_claim_and_none_may_remove_the_claims_of_others(tmp_path: Path) -> None:
    claim = CoreClaim.make(2, tmp_path / "cores")
    assert stat.S_IMODE((tmp_path / "cores").stat().st_mode) == 0o1777
    assert stat.S_IMODE((tmp_path / "cores" / claim.claim.name).stat().st_mode) == 0o644
    assert CoreClaim.make(None, tmp_path / "cores").share(8)[0] == 6
    claim.close()


def test_a_number_of_threads_in_the_environment_is_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    claim = CoreClaim.make(None, tmp_path / "cores")
    assert claim.share(8)[0] == 3 and not claim.is_told
    asked = CoreClaim.make(2, tmp_path / "cores")
    assert asked.share(8)[0] == 2 and asked.is_told


def test_what_others_leave_in_the_folder_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "cores"
    mine = CoreClaim.make(None, folder)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    assert mine.share(4) == (4, "computing with 4 of 4 cores")
    mine.close()


def test_a_folder_that_cannot_be_used_leaves_a_provider_to_itself(tmp_path: Path) -> None:
    (tmp_path / "cores").write_text("a file")
    claim = CoreClaim.make(None, tmp_path / "cores")
    assert claim.share(4)[0] == 4
    claim.close()
