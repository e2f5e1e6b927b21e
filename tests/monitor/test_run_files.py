"""Files of a run are complete or absent, contain strict JSON, and survive a full disk and a crash."""

import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ravnest.errors import RunError
from ravnest.monitor.events import EventLog, read_events
from ravnest.monitor.files import write_atomic, write_error
from ravnest.monitor.json_lines import JsonLines, read_lines


@contextmanager
def files_limited_to(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_atomic_write_replaces_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_write_that_fails_keeps_the_old_content_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    with files_limited_to(1000), pytest.raises(RunError, match=r"^cannot write .*summary.json: "):
        write_atomic(path, "x" * 2000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_full_disk_is_called_that() -> None:
    error = write_error(Path("run/summary.json"), OSError(errno.ENOSPC, "No space left on device"))
    assert str(error).startswith("cannot write run/summary.json: the disk is full; free some space")


def test_events_are_lines_with_time_kind_reason_and_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("provider_joined", "it had a valid token", provider="p1", memory_bytes=5, where=tmp_path)
    log.emit("loss", "not finite", value=float("nan"), recent=[1.0, float("inf")])
    log.close()
    first, second = read_events(tmp_path / "events.jsonl")
    assert first["kind"] == "provider_joined" and first["reason"] == "it had a valid token"
    assert first["provider"] == "p1" and first["memory_bytes"] == 5 and first["where"] == str(tmp_path)
    assert first["at"] > 1.7e9 and 0 <= first["elapsed"] <= second["elapsed"] < 60
    assert second["value"] is None and second["recent"] == [1.0, None]
    assert "NaN" not in (tmp_path / "events.jsonl").read_text()


def test_a_torn_last_line_is_left_out_and_the_next_run_continues_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"a"}\n{"kind":"b')
    assert read_events(path) == [{"kind": "a"}]
    log = EventLog(path)
    log.emit("c", "")
    log.close()
    assert [event["kind"] for event in read_events(path)] == ["a", "c"]


def test_a_file_of_one_long_torn_line_is_cut_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("x" * 10_000)
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_no_file_is_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_lines_from_many_threads_stay_whole(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines.jsonl")

    def work(name: int) -> None:
        for number in range(100):
            lines.append({"thread": name, "number": number, "padding": "x" * 50})

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    records = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert len(records) == 400
    assert [record["number"] for record in records if record["thread"] == 2] == list(range(100))


def test_a_refused_line_raises_once_and_never_stays_half_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    lines.append({"n": 1})
    with files_limited_to(60):
        with pytest.raises(RunError, match="cannot write"):
            lines.append({"n": "x" * 100})
        lines.append({"n": "y" * 100})
    lines.append({"n": 2})
    lines.close()
    lines.append({"n": 3})
    assert list(read_lines(path)) == [{"n": 1}, {"n": 2}]
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n'


def test_a_field_named_like_one_that_every_event_has_does_not_replace_it(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("evaluated", "on 8 samples", **{"loss": 0.5, "reason": 0.1, "kind": 0.2})
    log.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["kind"], event["reason"], event["loss"]) == ("evaluated", "on 8 samples", 0.5)
    assert (event["reason_"], event["kind_"]) == (0.1, 0.2)
