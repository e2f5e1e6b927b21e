"""Targets for a run: reports of providers, and the files of a run directory, possibly damaged or foreign."""

import hashlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ravnest.cli import status
from ravnest.coordinator.checkpoints.reader import load_checkpoint, newest_good
from ravnest.coordinator.checkpoints.resume_optimizer import resumed_metadata, trained_with
from ravnest.coordinator.checkpoints.saver import place_of
from ravnest.coordinator.feed.data_order import data_state, set_data_state
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.trace_collector import Tracing
from ravnest.graph.weights import stream_tensors
from ravnest.monitor.events import read_events
from ravnest.monitor.report_page import report_page
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.summary import ClusterSummary, Fault, StageSummary, Summary
from ravnest.monitor.trace import Trace, after
from ravnest.net.v1.control_pb2 import (
    LossRecord,
    ProviderMessage,
    Report,
    Span,
)
from tests.builders import a_plan, cluster_plan, stage_plan
from tests.fuzz.files import File
from tests.fuzz.message_targets import control
from tests.fuzz.rule import Target
from tests.fuzz.stage_targets import GRAPH, OPTIMIZER, SCHEDULE, a_stage
from tests.monitor.pipelines import pipeline


def _report(data: bytes) -> None:
    message = ProviderMessage()
    control(ProviderMessage)(data)
    message.ParseFromString(data)
    stage = stage_plan("anna", 0, GRAPH, role="root", parameters=16)
    plan = a_plan([cluster_plan([stage])])
    progress = Progress("fuzz", 1, Ledger(), plan=plan)
    progress.reports["anna"] = message.report
    progress.losses.extend((record.loss, record.samples) for record in message.report.losses)
    progress.snapshot()
    text = json.dumps(progress.summary("running", "").to_json(), allow_nan=False)
    with File("summary.json", text.encode()) as path:
        _shown(Summary.read(path))
        tracing = Tracing(path.parent / "trace.json", 8, (stage,))
        tracing.take("anna", message.report)
        tracing.write()
        if (path.parent / "trace.json").exists():
            report_page("fuzz", progress.summary("running", ""), Trace.read(path.parent / "trace.json"))


def _report_seeds() -> list[bytes]:
    losses = [LossRecord(microbatch=3, loss=0.5, samples=8)]
    report = Report(deployment="d1", updates=4, staleness_sum=3, staleness_counts=[1, 3], seconds=2.5, losses=losses)
    odd = Report(updates=1, busy_seconds=float("nan"), seconds=1.0, peak_memory_bytes=2**64 - 1)
    spans = [
        Span(kind=kind, microbatch=number, began_seconds=number + place / 4, seconds=0.25)
        for number in range(4)
        for place, kind in enumerate(("forward", "backward", "update"))
    ]
    spans += [Span(kind="wait", microbatch=1, began_seconds=1.9, seconds=0.05, detail="limit")]
    spans += [Span(kind="send", microbatch=1, began_seconds=1.9, seconds=0.05, detail="forward")]
    traced = Report(seconds=5.0, spans=spans)
    return [ProviderMessage(report=each).SerializeToString() for each in (report, odd, traced)]


def _shown(summary: Summary | None, events: list[dict[str, Any]] | None = None) -> None:
    """Everything that `ravnest status` does with a summary."""
    paths = RunPaths(Path("run"))
    json.dumps(status.as_json(paths, summary, None, events or []))
    status.print_state(paths, summary, None, [], events or [], io.StringIO())


def _summary(data: bytes) -> None:
    with File("summary.json", data) as path:
        _shown(Summary.read(path))


def _summary_seeds() -> list[bytes]:
    stage = StageSummary(
        provider="anna",
        stage=0,
        role="root",
        device="cpu",
        parameters=3,
        peak_memory_bytes=9,
        busy_fraction=0.5,
        updates=2,
    )
    cluster = ClusterSummary(id=0, samples=4, samples_per_second=2.0, stages=(stage,))
    fault = Fault(kind="provider_lost", provider="ben", cluster=0, at=1.0)
    summary = Summary(
        status="finished",
        reason="",
        samples=4,
        train_loss=0.5,
        eval={"loss": 0.5},
        clusters=(cluster,),
        faults=(fault,),
    )
    return [json.dumps(summary.to_json()).encode()]


def _trace(data: bytes) -> None:
    with File("trace.json", data) as path:
        trace = Trace.read(path)
        report_page("fuzz", Summary(status="finished", reason=""), trace)
        after(trace, ()).write(path)


def _trace_seeds() -> list[bytes]:
    return [json.dumps(Trace((tuple(pipeline(2, 10)),)).to_json()).encode()]


def _events(data: bytes) -> None:
    with File("events.jsonl", data) as path:
        _shown(None, read_events(path))


def _events_seeds() -> list[bytes]:
    lines = [{"at": 1.5, "elapsed": 0.1, "kind": "joined", "reason": "anna joined", "provider": "anna"}, {"kind": 3}]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]


def _part() -> bytes:
    tensors, metadata = a_stage().state()
    return b"".join(stream_tensors(tensors, metadata))


def _manifest(part: bytes) -> dict[str, Any]:
    described = {"file": "part-0.safetensors", "size": len(part), "sha256": hashlib.sha256(part).hexdigest()}
    state = {"data_state": "", **trained_with(_job())}
    numbers = {"format": 1, "checkpoint": 5, "updates": 5, "samples": 40, "epoch": 0, "position": 5}
    return {**numbers, "parts": [described], "ledger": {"completed": 5}, "state": state}


def _job() -> Any:
    return SimpleNamespace(optimizer_spec=OPTIMIZER, schedule_spec=SCHEDULE)


def _checkpoint(manifest: bytes, part: bytes) -> None:
    with File("0000000005/checkpoint.json", manifest) as path:
        (path.parent / "part-0.safetensors").write_bytes(part)
        info, damaged = newest_good(path.parent.parent)
        for item in damaged:
            assert item.reason.replace("\n", "").isprintable()
        if info is not None:
            contents = load_checkpoint(info)
            place_of(info)
            resumed_metadata(contents.metadata, info.state, _job())


def _checkpoint_manifest(data: bytes) -> None:
    _checkpoint(data, _part())


def _checkpoint_part(data: bytes) -> None:
    _checkpoint(json.dumps(_manifest(data)).encode(), data)


def _data_state(data: bytes) -> None:
    loader = SimpleNamespace(generator=torch.Generator())
    set_data_state(loader, data.decode(errors="replace"))


TARGETS = (
    Target("report", _report, _report_seeds),
    Target("summary", _summary, _summary_seeds, is_json=True),
    Target("trace", _trace, _trace_seeds, is_json=True),
    Target("events", _events, _events_seeds, is_json=True),
    Target(
        "checkpoint_manifest", _checkpoint_manifest, lambda: [json.dumps(_manifest(_part())).encode()], is_json=True
    ),
    Target("checkpoint_part", _checkpoint_part, lambda: [_part()]),
    Target("data_state", _data_state, lambda: [data_state(SimpleNamespace(generator=torch.Generator())).encode()]),
)
