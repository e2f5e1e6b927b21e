"""Whose fault values that are not finite are, from what the stages say: the model's, the data's, or a provider's."""

from ravnest.coordinator.health.not_finite import StageWord, judge_not_finite

WELL = {"received": "finite", "sent": "finite"}


def test_the_stage_where_it_arose_is_named_with_its_operator() -> None:
    words = [
        StageWord("anna", "", "finite"),
        StageWord("ben", "finite", "infinite", "operator", "the operator log"),
        StageWord("cleo", "infinite", "nan", "operator", "the operator sub"),
    ]
    ruling = judge_not_finite(words, 2)
    assert (ruling.accused, ruling.reason) == ("", "it arose in stage 1 (ben): the operator log")


def test_who_sent_what_it_did_not_compute_is_accused_by_who_got_it() -> None:
    words = [StageWord("anna", "", "finite"), StageWord("mallory", **WELL), StageWord("cleo", "nan", "nan")]
    ruling = judge_not_finite(words, 2)
    assert (ruling.accused, ruling.accuser) == ("mallory", "cleo")
    assert "mallory sent values that are not finite to stage 2" in ruling.reason


def test_infinities_of_a_mask_that_everybody_passes_on_accuse_nobody() -> None:
    words = [
        StageWord("anna", "", "infinite"),
        StageWord("ben", "infinite", "infinite"),
        StageWord("cleo", "infinite", "nan", "operator", "the operator log"),
    ]
    assert "it arose in stage 2 (cleo)" in judge_not_finite(words, 2).reason


def test_gradients_are_followed_from_the_leaf_back() -> None:
    root = StageWord("anna", "", "finite", gradients_received="nan")
    ben = StageWord("ben", "finite", "finite", gradients_received="finite", gradients_sent="nan", steep="sqrt")
    leaf = StageWord("cleo", "finite", "finite", gradients_sent="finite")
    ruling = judge_not_finite([root, ben, leaf], 0)
    assert ruling.accused == "" and "the gradients became not finite in stage 1 (ben)" in ruling.reason
    assert "such as sqrt has no finite gradient" in ruling.reason
    liar = StageWord("mallory", "finite", "finite", gradients_received="finite", gradients_sent="finite")
    ruling = judge_not_finite([root, liar, leaf], 0)
    assert (ruling.accused, ruling.accuser) == ("mallory", "anna")


def test_one_that_sent_nan_and_says_nothing_of_it_is_accused() -> None:
    ruling = judge_not_finite([StageWord("anna"), StageWord("ben", "nan", "nan")], 1)
    assert (ruling.accused, ruling.accuser) == ("anna", "ben") and "does not say why" in ruling.reason


def test_where_nothing_is_known_nobody_is_accused() -> None:
    ruling = judge_not_finite([StageWord("anna"), StageWord("ben")], 1)
    assert ruling.accused == "" and "anna, ben could not say" in ruling.reason


def test_a_leaf_that_sends_rows_which_are_not_finite_is_accused_unless_the_table_is_the_reason() -> None:
    words = [StageWord("anna", "nan", "nan"), StageWord("ben", "nan", "nan"), StageWord("mallory", "nan", "nan")]
    ruling = judge_not_finite(words, 2)
    assert (ruling.accused, ruling.accuser) == ("mallory", "anna")
    assert ruling.reason == "mallory sent values that are not finite to stage 0, and does not say why"
    words[2] = StageWord("cleo", "nan", "nan", "parameter", "the parameter wte.weight is not finite")
    ruling = judge_not_finite(words, 2)
    assert not ruling.accused
    assert ruling.reason == "it arose in stage 2 (cleo): the parameter wte.weight is not finite"
