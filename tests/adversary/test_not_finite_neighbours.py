"""A provider that sends activations or gradients that are no numbers, and says nothing of it: real processes.

It is named and gets no stage any more, and the run goes on to its end; the user's learning rate is not blamed.
"""

from pathlib import Path

import pytest

from tests.adversary.lying_swarm import events, lying_swarm
from tests.e2e.jobs import a_job, batches
from tests.e2e.tied_jobs import a_tied_model, next_token_loss, token_batch
from tests.e2e.watching import adds_up


@pytest.mark.parametrize(
    ("liar", "lie", "words"),
    [
        ("provider-1", "activations that are no numbers", "sent values that are not finite to stage"),
        ("provider-2", "gradients that are no numbers", "sent gradients that are not finite to stage"),
    ],
)
def test_who_sends_what_is_not_finite_is_named_and_the_run_goes_on(
    liar: str, lie: str, words: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with lying_swarm(3, liar, lie, first=4) as swarm:
        result = swarm.train(a_job(batches([8] * 16)), run=run, display=False)
    assert result.summary.status == "finished" and adds_up(result, 16)
    found = events(run, "not_finite")
    assert [event["accused"] for event in found] == [liar] and words in found[0]["reason"], found
    assert "learning rate" not in found[0]["reason"]
    assert [event["provider"] for event in events(run, "rules_broken")] == [liar]
    assert {fault.provider for fault in result.summary.faults} == {liar}


@pytest.mark.parametrize(
    ("liar", "role", "lie", "words"),
    [
        ("provider-0", "root", "gradients that are no numbers", "sent gradients that are not finite to stage 2"),
        ("provider-2", "leaf", "activations that are no numbers", "sent values that are not finite to stage 0"),
    ],
)
def test_a_root_and_a_leaf_that_exchange_looked_up_rows_are_held_to_the_same(
    liar: str, role: str, lie: str, words: str, tmp_path: Path
) -> None:
    run, data = tmp_path / "run", [token_batch(seed) for seed in range(16)]
    job = a_job(data, model=a_tied_model(), loss=next_token_loss)
    with lying_swarm(3, liar, lie, first=4) as swarm:
        result = swarm.train(job, run=run, display=False)
    planned = events(run, "planned")[0]
    assert [stage["role"] for stage in planned["stages"] if stage["provider"] == liar] == [role]
    assert result.summary.status == "finished" and adds_up(result, 16)
    found = events(run, "not_finite")
    assert [event["accused"] for event in found] == [liar] and words in found[0]["reason"], found
