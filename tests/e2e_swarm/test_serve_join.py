"""A swarm of real processes on addresses of their own: one `ravnest serve`, several `ravnest join`, and an invite."""

import hashlib
import json
import re
import shutil
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.jobfile import load_job
from tests.e2e.command import Running, ravnest, within
from tests.e2e.jobs import a_job_file
from tests.swarms.machines import Swarm, ended_well

pytestmark = pytest.mark.timeout(300)


def refused(provider: Running, *words: str) -> None:
    """It ends with code 2 and one sentence, in which these words are."""
    said = provider.to_the_end()
    assert provider.process.returncode == 2, said
    assert re.fullmatch(r"(this machine: .*\n)?(joined .*\n(connection .*\n)?)?ravnest: error: .*\n", said), said
    assert all(word in said for word in words), said


def test_three_machines_train_to_the_same_result_as_the_embedded_swarm(
    machines: Swarm, swarm: EmbeddedSwarm, tmp_path: Path
) -> None:
    path = a_job_file(tmp_path, eval_data="batches", epochs="3", pipeline="ravnest.Pipeline(in_flight=1)")
    alone = swarm.train(load_job(str(path)), providers=3, run=tmp_path / "embedded", display=False)

    # These have never joined anybody: they measure themselves.
    shutil.rmtree(tmp_path / "cache")
    serving, invite = machines.serve("--providers", "3", "--clusters", "1")
    # So much slower that no measuring on a busy machine could be wrong by as much.
    providers = [machines.join(invite, "Anna's PC", "--pretend-slower", "20")]
    providers += [machines.join(invite, "ben"), machines.join(invite, "ben")]
    for provider in providers:
        said = ended_well(provider)
        assert re.search(r"^this machine: cpu, \d+ cores?, [\d.]+ GiB, [\d.]+ [GT]FLOP/s$", said, re.M), said
        assert re.search(r"^connection to the coordinator: [\d.]+ ms, \d+ Mbit/s down, \d+ Mbit/s up$", said, re.M), (
            said
        )
        assert re.search(r"^joined 127\.0\.0\.2:\d+ as \S+, lending cpu at 127\.0\.0\.\d:\d+$", said, re.M), said
        assert re.search(r"^taking stage [123] of 3$", said, re.M), said
        assert said.endswith("ended: the run has finished; this machine trained on 192 samples\n"), said
    said = ended_well(serving)
    assert serving.out == "", "more than the invite was printed"
    assert "warning: 127.0.0.2 is an address of this machine alone" in said
    machine = r"cpu, \d+ cores?, [\d.]+ GiB, [\d.]+ [GT]FLOP/s, [\d.]+ ms, \d+/\d+ Mbit/s"
    assert re.search(rf"\] ben joined with {machine}: [123] of 3 providers\n", said), said
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    joined = {event["provider"]: event for event in events if event["kind"] == "joined"}
    assert joined.keys() == {"anna-s-pc", "ben", "ben-2"}
    assert re.fullmatch(f"ben joined with {machine}", joined["ben"]["reason"]), joined
    assert joined["anna-s-pc"]["flops_per_second"] < joined["ben"]["flops_per_second"] / 2
    for half in ("bfloat16_flops_per_second", "float16_flops_per_second"):
        assert joined["ben"][half] > 1e7 and joined["anna-s-pc"][half] < joined["ben"][half]
    assert joined["ben"]["flops_per_second"] > 1e8 and 0 < joined["ben"]["round_trip_seconds"] < 5
    assert invite.token.encode() not in said

    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished"
    stages = summary["clusters"][0]["stages"]
    assert sorted(stage["provider"] for stage in stages) == ["anna-s-pc", "ben", "ben-2"]
    assert summary["eval"]["loss"] == pytest.approx(alone.summary.eval["loss"], abs=1e-6)
    assert alone.model is not None
    ours, theirs = load_file(tmp_path / "run/model.safetensors"), load_file(alone.model)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-6

    private = [tmp_path / "run/store.sqlite", *(tmp_path / "run/identity").iterdir()]
    private += [path for name in ("data", "cache") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert len(list((tmp_path / "data").rglob("node.key"))) == 3
    kept = [path for path in (tmp_path / "cache/ravnest/artifacts").iterdir() if path.name != "lock"]
    # Graph and weights of three stages, and the weights that never change, for whoever holds a replica: there are none.
    assert len(kept) == 7 and all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in kept)


def test_random_weights_are_drawn_by_the_providers_and_train_to_the_same_result(
    machines: Swarm, swarm: EmbeddedSwarm, tmp_path: Path
) -> None:
    wide = (
        "torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))"
    )
    path = a_job_file(tmp_path, model=wide, epochs="1", pipeline="ravnest.Pipeline(in_flight=1)")
    alone = swarm.train(load_job(str(path)), providers=2, run=tmp_path / "embedded", display=False)
    serving, invite = machines.serve("--providers", "2", "--clusters", "1")
    said = [machines.join(invite, name, "--weights", "none") for name in ("anna", "ben")]
    drawn = [line for provider in said for line in re.findall(r"([\d.]+) MB were drawn here", ended_well(provider))]
    ended_well(serving)
    assert drawn, "one of the stages has the layer of 16 kB"
    assert alone.model is not None
    ours, theirs = load_file(tmp_path / "run/model.safetensors"), load_file(alone.model)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-6


def test_clusters_average_over_direct_lines_links_and_the_relay(machines: Swarm, tmp_path: Path) -> None:
    a_job_file(tmp_path, eval_data="batches", epochs="20", averaging='ravnest.Averaging(every=64, codec="int8")')
    serving, invite = machines.serve("--providers", "3", "--clusters", "3")
    machines.join(invite, "anna")
    for name in ("ben", "carla"):
        machines.join(invite, name, "--outbound-only")
    ended_well(serving)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [len(cluster["stages"]) for cluster in summary["clusters"]] == [1, 1, 1]
    assert summary["averaging"]["rounds"] >= 2 and summary["averaging"]["skipped"] == 0
    assert summary["ledger"] == {"fed": 160, "completed": 160, "replayed": 0, "lost": 0, "applied_twice": 0}
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["kind"] == "round"]
    assert {(event["lines"], event["direct"]) for event in rounds} == {(3, 1)}, "anna alone can be dialled"
    linked = " ".join(event["reason"] for event in events if event["kind"] == "linked")
    assert "ben dials out only, and carla dials out only" in linked


def test_an_invite_that_is_no_longer_good_is_refused_with_one_sentence(machines: Swarm) -> None:
    a_job_file(machines.folder)
    serving, invite = machines.serve("--providers", "9")
    expired = machines.new_invite("--hours", "0.0001")
    revoked = machines.new_invite()
    assert ravnest("invite", "run", "--revoke", revoked.token.id, folder=machines.folder).returncode == 0
    once = machines.new_invite("--uses", "1")
    anna = machines.join(once, "anna")
    anna.until("joined")
    ended = [machines.join(bad, name) for bad, name in ((expired, "x"), (revoked, "y"), (once, "z"))]
    elsewhere = machines.join(replace(invite, fingerprint=bytes(32)), "w")
    for provider in ended[:2]:
        refused(provider, "does not accept this invite: it has expired, was revoked", "ask the requester for a new")
    refused(ended[2], f"the invite {once.token.id} has been used up; ask the requester for a new invite")
    refused(elsewhere, "is not the swarm the invite is for; nothing was sent to it")
    listed = ravnest("invite", "run", folder=machines.folder).stdout
    for token, state in ((expired.token, "expired"), (revoked.token, "revoked"), (once.token, "0 uses left")):
        assert re.search(rf"^{token.id}  {state} ", listed, re.M), listed
        assert token.secret.hex() not in listed and token.encode() not in listed
    assert re.search(rf"^{once.token.id} .*\n  anna  joined ", listed, re.M), listed

    # Who is in stays in, and may come back: a certificate outlives the invite that it was issued for.
    anna.signal(signal.SIGINT)
    assert ended_well(anna).endswith("leaving the swarm: signal SIGINT\n")
    serving.until("] anna left: 0 of 9 providers")
    serving.said = ""
    back = machines.join(once, "anna")
    back.until("joined 127.0.0.2")
    assert " as anna, " in back.said
    serving.until("] anna joined with cpu, ")
    serving.until("Mbit/s: 1 of 9 providers")
    with within(10, "the end of the coordinator"):
        serving.signal(signal.SIGINT)
        serving.to_the_end()
    assert serving.process.returncode == 130
    assert "ended: the " in ended_well(back)


def test_training_goes_on_without_the_holder_of_a_stage_who_is_kicked(machines: Swarm, tmp_path: Path) -> None:
    a_job_file(tmp_path, epochs="40")
    slowly = ("--pretend-seconds", "0.01,0.02")
    serving, invite = machines.serve("--providers", "2", "--clusters", "1")
    others = {name: machines.join(invite, name, *slowly) for name in ("anna", "ben")}
    others["ben"].until("training ")
    others["carla"] = machines.join(invite, "carla", *slowly)
    others["carla"].until("connection to the coordinator")
    assert ravnest("kick", "run", "ben", folder=machines.folder).returncode == 0
    said = others.pop("ben").to_the_end()
    assert "ben was thrown out of the swarm; ask the requester for a new invite" in said
    ended_well(serving)
    for other in others.values():
        ended_well(other)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and [fault["provider"] for fault in summary["faults"]] == ["ben"]
    ledger = summary["ledger"]
    assert (ledger["completed"], ledger["lost"], ledger["applied_twice"]) == (320, 0, 0)
    assert {stage["provider"] for stage in summary["clusters"][0]["stages"]} <= {"anna", "carla"}


def test_a_node_that_is_kicked_is_out_and_the_swarm_goes_on_without_it(machines: Swarm) -> None:
    a_job_file(machines.folder)
    serving, invite = machines.serve("--providers", "2", "--clusters", "1")
    ben = machines.join(invite, "ben")
    serving.until("] ben joined with cpu, ")
    serving.until("Mbit/s: 1 of 2 providers")
    kicked = ravnest("kick", "run", "ben", "--reason", "too slow", folder=machines.folder)
    assert (kicked.returncode, kicked.stderr) == (0, "")
    with within(4, "the end of the one that was kicked"):
        refused(ben, "ben was thrown out of the swarm (too slow); ask the requester for a new invite")
    serving.until("ben left: 0 of 2 providers")
    refused(machines.join(invite, "ben"), "ben was thrown out of the swarm; ask the requester for a new invite")
    others = [machines.join(invite, name) for name in ("anna", "cid")]
    ended_well(serving)
    for other in others:
        assert "taking stage" in ended_well(other)
    summary = json.loads((machines.folder / "run/summary.json").read_text())
    assert {s["provider"] for s in summary["clusters"][0]["stages"]} == {"anna", "cid"}
    nobody = ravnest("kick", "run", "dora", folder=machines.folder, warm=True)
    assert (nobody.returncode, nobody.stdout) == (2, "")
    assert nobody.stderr.startswith("ravnest: error: there is no node dora in this run")


def test_a_coordinator_that_is_started_again_knows_its_swarm(machines: Swarm) -> None:
    a_job_file(
        machines.folder,
        before="endless = __import__('itertools').cycle",
        data="lambda: endless(batches)",
        checkpoint="ravnest.Checkpoint(every_updates=5, every_seconds=None)",
    )
    serving, invite = machines.serve()
    anna = machines.join(invite, "anna")
    anna.until("training ")
    serving.signal(signal.SIGINT)
    said = serving.to_the_end()
    assert serving.process.returncode == 130 and "continue with --resume" in said, said
    assert "ended: the run has stopped" in ended_well(anna)
    revoking = ravnest("invite", "run", "--revoke", invite.token.id, folder=machines.folder, warm=True)
    assert revoking.returncode == 0

    again, fresh = machines.serve("--resume", "--set", "max_updates=1000000", port=invite.port)
    assert fresh.fingerprint == invite.fingerprint and fresh.address == invite.address
    anna = machines.join(invite, "anna")
    anna.until("training ")
    assert " as anna, " in anna.said
    # When the last provider leaves, what was learned is kept, and the run waits for another.
    anna.signal(signal.SIGTERM)
    assert "ended: it asked to leave, and nothing is lost" in ended_well(anna)
    again.until("] waiting for more providers: no provider is connected")
    anna = machines.join(invite, "anna")
    anna.until("training ")
    again.signal(signal.SIGINT)
    assert "saved after" in again.to_the_end() and again.process.returncode == 130
    assert "ended: the run has stopped" in ended_well(anna)
    summary = json.loads((machines.folder / "run/summary.json").read_text())
    assert (summary["ledger"]["replayed"], summary["faults"]) == (0, [])


def test_a_coordinator_that_was_killed_is_taken_up_by_the_next(machines: Swarm) -> None:
    a_job_file(
        machines.folder,
        before="endless = __import__('itertools').cycle",
        data="lambda: endless(batches)",
        checkpoint="ravnest.Checkpoint(every_updates=5, every_seconds=None)",
    )
    serving, invite = machines.serve("--providers", "2", "--clusters", "1", "--advertise", "127.0.0.2:0")
    providers = [machines.join(invite, name) for name in ("anna", "ben")]
    for provider in providers:
        provider.until("training ")
    seen = ravnest("status", "run", folder=machines.folder).stdout
    assert re.search(r"^anna +connected +cpu .* 127\.0\.0\.3:\d+ +[01] *$", seen, re.M), seen
    # The machine of the coordinator and those of the providers lose their power.
    for running in (serving, *providers):
        running.signal(signal.SIGKILL)
        running.to_the_end()
    seen = ravnest("status", "run", folder=machines.folder).stdout
    assert "connected" not in seen and re.search(r"^ben +last seen .* ago +cpu ", seen, re.M), seen

    again, fresh = machines.serve("--resume", "--clusters", "1", "--set", "max_updates=1000000", port=None)
    assert fresh.address == invite.address and fresh.fingerprint == invite.fingerprint
    again.until("] knows ")
    assert re.search(r"\] knows (anna and ben|ben and anna) from before: waiting for them to come back\n", again.said)
    providers = [machines.join(invite, name) for name in ("ben", "anna")]
    for provider in providers:
        provider.until("training ")
    assert re.search(r"\] it had come to \d+ updates before; ", again.until("] training")), again.said
    again.signal(signal.SIGINT)
    assert "saved after" in again.to_the_end() and again.process.returncode == 130
    for provider in providers:
        assert "ended: the run has stopped" in ended_well(provider)


@pytest.mark.parametrize("command", [("invite", "--new"), ("invite",), ("kick", "anna")])
def test_a_run_that_was_never_served_has_no_invites(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    name, *rest = command
    for place, words in (
        ("run", "run has no invites: it was not begun with `ravnest serve`"),
        ("nowhere", "no run at"),
    ):
        done = ravnest(name, place, *rest, folder=tmp_path, warm=place == "nowhere")
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]
