"""The schedule of faults depends only on its seed, omits no case, and each case can be written as text and parsed."""

from itertools import islice

import pytest

from tests.chaos.chaos import cases_for
from tests.chaos.faults import FAULTS, fault
from tests.chaos.schedule import ANY_CLUSTERS, BETWEEN_CLUSTERS, MAX_PAUSE_SECONDS, Case, cases, for_roles, schedule

EVERY = (*ANY_CLUSTERS, *BETWEEN_CLUSTERS)


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    first, again, other = (list(islice(schedule(seed, EVERY), 200)) for seed in (7, 7, 8))
    assert first == again != other


def test_every_case_comes_once_before_any_comes_again() -> None:
    planned = list(islice(schedule(3, EVERY), 2 * len(EVERY)))
    for part in (planned[: len(EVERY)], planned[len(EVERY) :]):
        assert sorted(map(str, (each.case for each in part))) == sorted(map(str, EVERY))
    assert [each.number for each in planned] == list(range(1, 2 * len(EVERY) + 1))
    assert all(0 <= each.pause_seconds <= MAX_PAUSE_SECONDS and 0 <= each.choice < 1 for each in planned)


def test_every_kind_of_fault_affects_every_role_that_it_may_affect() -> None:
    alone = {each.faults[0] for each in ANY_CLUSTERS if len(each.faults) == 1 and not each.during}
    assert alone == {(kind.kind, role) for kind in FAULTS for role in kind.roles}
    assert any(len(each.faults) == 2 for each in ANY_CLUSTERS)
    assert {each.during for each in EVERY} == {"", "round", "checkpoint", "deployment", "evaluation"}


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_case_equals_its_parsed_text(case: Case) -> None:
    assert cases(str(case)) == (case,)
    for kind, role in case.faults:
        assert fault(kind, "p1", role).kind == kind


def test_a_pipeline_of_two_has_no_stem_and_one_cluster_no_round() -> None:
    assert not any(role == "stem" for each in cases_for(2, 2) for _, role in each.faults)
    assert any(each.during == "round" for each in cases_for(2, 2))
    assert not any(each.during == "round" for each in cases_for(1, 3))
    assert for_roles(cases("kill root", "kill root + kill stem"), ["root"]) == cases("kill root")


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault 'stop' of a coordinator"):
        fault("stop", "home", "coordinator")
