"""Checks of the doctor, each from both sides of its limit."""

import pytest

from ravnest.errors import PeerError
from ravnest.provider.doctor.checks import (
    CheckResult,
    Level,
    Versions,
    exit_code,
    from_error,
    judge_clock,
    judge_connection,
    judge_device,
    judge_disk,
    judge_invite,
    judge_link,
    judge_memory,
    judge_name,
    judge_port,
    judge_python,
    judge_speed,
    judge_torch,
    judge_versions,
)

GIB = 1 << 30
OURS = Versions("0.1.0", 1, 1)


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (judge_python((3, 10)), "problem", "Python 3.10 is too old"),
        (judge_python((3, 11)), "ok", "Python 3.11"),
        (judge_torch(None), "problem", "PyTorch is not installed"),
        (judge_torch("2.10.1"), "problem", "PyTorch 2.10.1 is too old"),
        (judge_torch("2.11.0"), "ok", "PyTorch 2.11.0"),
        (judge_torch("2.13.0+cu128"), "ok", "PyTorch 2.13.0+cu128"),
        (judge_torch("2.14.0a0+git1"), "warning", "newer than what Ravnest was tried with"),
        (judge_torch("3.0"), "warning", "newer than"),
        (judge_torch("2.12.0", "libcuda.so: no"), "problem", "cannot be loaded (libcuda.so: no)"),
        (judge_device("cpu", "Ryzen", 8, False), "ok", "cpu: Ryzen, 8 cores"),
        (judge_device("cpu", "Ryzen", 8, True), "warning", "an NVIDIA GPU that PyTorch does not use"),
        (judge_device("cuda:0", "RTX", 8, True), "ok", "cuda:0: RTX"),
        (judge_memory(12 * GIB, None), "ok", "12 GiB free"),
        (judge_memory(12 * GIB, 8 * GIB), "ok", "12 GiB free, 8 GiB of it lent"),
        (judge_memory(12 * GIB, 16 * GIB), "warning", "--memory says 16 GiB, but only 12 GiB are free"),
        (judge_memory(12 * GIB, GIB), "warning", "1 GiB of memory can be lent: enough for a small stage"),
        (judge_memory(100 << 20, None), "problem", "100 MiB of memory can be lent, which is too little"),
        (
            judge_speed(95e9, 31.2e9, {"bfloat16": 190e9, "float16": 9e9}),
            "ok",
            "95 GFLOP/s in training (190 GFLOP/s in bfloat16, 9 GFLOP/s in float16), 31.2 GB/s in memory",
        ),
        (judge_speed(4e9, 5e9, {"bfloat16": 4e9}), "warning", "this is slow"),
        (judge_disk("/home", 36 * GIB), "ok", "36 GiB free in /home"),
        (judge_disk("/home", 200 << 20), "warning", "the disk is nearly full"),
        (judge_disk("/home", 0), "problem", "this machine's key cannot be kept"),
        (judge_port("0.0.0.0", 0, ""), "ok", "can listen on 0.0.0.0, on a free port"),
        (judge_port("0.0.0.0:7", 7, "permission denied"), "problem", "cannot listen on 0.0.0.0:7: permission denied"),
        (judge_name("a.example", ["192.0.2.1"]), "ok", "a.example is 192.0.2.1"),
        (judge_name("192.0.2.1", ["192.0.2.1"]), "ok", "192.0.2.1"),
        (judge_name("a.example", [], "not known"), "problem", "there is no address for a.example (not known)"),
        (judge_connection("a:1", 0.024), "ok", "a:1 answers, after 24 ms"),
        (judge_connection("a:1", 0, "connection refused"), "problem", "cannot connect to a:1: connection refused"),
        (judge_versions(OURS, OURS), "ok", "both run Ravnest 0.1.0"),
        (judge_versions(OURS, Versions("0.2.0", 1, 1)), "ok", "they understand each other"),
        (
            judge_versions(OURS, Versions("0.2.0", 2, 1)),
            "problem",
            "the coordinator 0.2.0 (protocol 2, graph format 1)",
        ),
        (
            judge_versions(OURS, Versions("0.2.0", 1, 2)),
            "problem",
            "the coordinator 0.2.0 (protocol 1, graph format 2)",
        ),
        (judge_clock(0.3, 0.01), "ok", "the clocks agree"),
        (judge_clock(30, 0.01), "ok", "30 seconds behind"),
        (judge_clock(-3600, 0.01), "warning", "60 minutes ahead of the coordinator's"),
        (
            judge_clock(-86000, 0.01),
            "problem",
            "24 hours ahead of the coordinator's: certificates would not be accepted",
        ),
        (judge_clock(125, 10), "ok", "115 seconds behind"),
        (judge_link(0.024, 4e6, 11.5e6), "ok", "24 ms there and back, 92 Mbit/s down, 32 Mbit/s up"),
        (judge_link(0.024, 4e5, 11.5e6), "warning", "3.2 Mbit/s up: this is slow"),
        (judge_link(0.8, 4e6, 11.5e6), "warning", "that is a long way"),
        (judge_invite(True, "invite 1 is good"), "ok", "invite 1 is good"),
        (judge_invite(False, "it was revoked; ask for a new one"), "problem", "it was revoked"),
        (
            judge_invite(False, "it was revoked; ask", "anna"),
            "warning",
            "it was revoked, but this machine joined as anna",
        ),
        (from_error("device", PeerError("a; b; use --device cpu")), "problem", "a; b"),
    ],
)
def test_facts_are_judged(finding: CheckResult, level: Level, words: str) -> None:
    assert finding.level == level and words in finding.sentence, finding
    assert bool(finding.fix) == (level != "ok"), "what is not well has a fix, and nothing else has one"


def test_only_a_problem_is_an_exit_code() -> None:
    fine, warning, problem = (CheckResult("x", level, "x") for level in ("ok", "warning", "problem"))
    assert (exit_code([]), exit_code([fine, warning]), exit_code([fine, problem])) == (0, 0, 2)
