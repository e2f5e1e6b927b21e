"""Who goes when one stage accuses another: a run loses its liar, and a liar costs it one honest machine at most."""

from ravnest.coordinator.health.accusations import Accusations


def test_the_accused_goes_and_gets_no_stage_any_more() -> None:
    accusations = Accusations()
    verdict = accusations.judge("ben", "mallory", "a frame that cannot be")
    assert (verdict.culprit, verdict.cleared) == ("mallory", ()) and "ben says" in verdict.reason
    assert accusations.barred("mallory") and not accusations.barred("ben")


def test_one_that_accuses_a_second_neighbour_goes_and_the_first_may_come_back() -> None:
    accusations = Accusations()
    accusations.judge("mallory", "ben", "no")
    verdict = accusations.judge("mallory", "cleo", "no")
    assert verdict.culprit == "mallory" and set(verdict.cleared) == {"ben", "cleo"}
    assert accusations.barred("mallory") and not accusations.barred("ben") and not accusations.barred("cleo")


def test_the_same_accusation_again_costs_the_accuser_nothing() -> None:
    accusations = Accusations()
    accusations.judge("ben", "mallory", "no")
    assert accusations.judge("ben", "mallory", "no").culprit == "mallory"


def test_whom_others_have_accused_as_well_is_not_cleared() -> None:
    accusations = Accusations()
    accusations.judge("anna", "mallory", "no")
    accusations.judge("ben", "mallory", "no")
    assert accusations.judge("ben", "cleo", "no").culprit == "ben"
    assert accusations.barred("mallory")


def test_one_that_broke_the_rules_is_not_believed_of_others() -> None:
    accusations = Accusations()
    accusations.judge("anna", "mallory", "no")
    assert accusations.judge("mallory", "anna", "no").culprit == ""
    assert not accusations.barred("anna")
