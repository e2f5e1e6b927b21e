"""Accusations between stages: a run loses its liar, and a liar costs it one honest provider at most."""

from ravnest.coordinator.health.accusations import AccusationRuling, judge_accusation
from ravnest.coordinator.swarm.provider_record import ProviderRecords


class Run:
    def __init__(self) -> None:
        self.records = ProviderRecords()

    def judge(self, accuser: str, accused: str) -> AccusationRuling:
        return judge_accusation(self.records, accuser, accused, "a frame that cannot be")

    def barred(self) -> set[str]:
        return {name for name, record in self.records.items() if record.conduct.barred_because}


def test_the_accused_goes_and_gets_no_stage_any_more() -> None:
    run = Run()
    ruling = run.judge("ben", "mallory")
    assert (ruling.culprit, ruling.cleared) == ("mallory", ()) and "ben" in ruling.reason
    assert run.barred() == {"mallory"}


def test_one_that_accuses_a_second_neighbour_goes_and_the_first_may_come_back() -> None:
    run = Run()
    run.judge("mallory", "ben")
    ruling = run.judge("mallory", "cleo")
    assert ruling.culprit == "mallory" and set(ruling.cleared) == {"ben", "cleo"}
    assert run.barred() == {"mallory"}


def test_the_same_accusation_again_costs_the_accuser_nothing() -> None:
    run = Run()
    run.judge("ben", "mallory")
    assert run.judge("ben", "mallory").culprit == "mallory"


def test_a_provider_that_others_have_accused_as_well_is_not_cleared() -> None:
    run = Run()
    run.judge("anna", "mallory")
    run.judge("ben", "mallory")
    assert run.judge("ben", "cleo").culprit == "ben"
    assert "mallory" in run.barred()


def test_one_that_broke_the_rules_is_not_believed_of_others() -> None:
    run = Run()
    run.judge("anna", "mallory")
    assert run.judge("mallory", "anna").culprit == ""
    assert run.barred() == {"mallory"}
