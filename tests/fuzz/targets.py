"""Everything that reads foreign bytes, each as one function of bytes, with valid inputs to start from.

The property tests and the long runs of `make fuzz` share these: whatever goes in, either a value comes out or a
RavnestError whose message is one printable sentence. `judge` is that rule.
"""

import asyncio
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import SGD

from ravnest import __version__
from ravnest.cli import status
from ravnest.coordinator.admission import Admission
from ravnest.coordinator.checkpoint_reading import load_checkpoint, newest_good
from ravnest.coordinator.data_order import data_state, set_data_state
from ravnest.coordinator.ledger import Ledger
from ravnest.coordinator.members import check_version
from ravnest.coordinator.progress import Progress
from ravnest.coordinator.resuming import resumed_metadata, trained_with
from ravnest.coordinator.saving import place_of
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.errors import RavnestError
from ravnest.graph.portable import FORMAT_VERSION, Device, Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.program import Program
from ravnest.graph.weights import WeightsReader, stream_tensors
from ravnest.monitor.events import read_events
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.summary import ClusterSummary, Fault, StageSummary, Summary
from ravnest.net import certificates
from ravnest.net.address import split_address
from ravnest.net.authority import AUTHORITY_FILE, SwarmAuthority
from ravnest.net.frames import MAGIC, Frame, FrameKind, decode_at, encode
from ravnest.net.identity import Callers, Identity
from ravnest.net.link import Control, Link
from ravnest.net.node_identity import NodeIdentity
from ravnest.net.swarm_invite import SwarmInvite
from ravnest.net.v1.control_pb2 import (
    Chunk,
    CoordinatorMessage,
    Deploy,
    FetchRequest,
    JoinRequest,
    LossRecord,
    ProviderMessage,
    Report,
)
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.planner.plan import Plan, StagePlan
from ravnest.spec import OptimizerSpec, ScheduleSpec

MOST_CHARACTERS = 1500
"""A sentence that is longer carries what a peer sent, not what is wrong with it."""


@dataclass(frozen=True)
class Target:
    """One decoder. `seeds` are valid inputs, from which mutations start."""

    name: str
    decode: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    is_json: bool = False


def judge(target: Target, data: bytes) -> RavnestError | None:
    """None where the bytes were read, the error where they were refused. Anything else is a bug and raises."""
    try:
        target.decode(data)
    except RavnestError as error:
        sentence = str(error)
        assert sentence and sentence.isprintable(), f"not one printable sentence: {sentence!r}"
        assert len(sentence) <= MOST_CHARACTERS, f"a sentence of {len(sentence)} characters: {sentence[:200]!r}"
        return error
    return None


# Frames and messages.


def _frames(data: bytes) -> None:
    end = 0
    while end < len(data):
        frame, end = decode_at(data, end)
        for tensor in frame.tensors.values():
            # Reads every byte that the tensor claims to lie on.
            tensor.clone()


def _frame_header(data: bytes) -> None:
    head = MAGIC + len(data).to_bytes(4, "little") + data
    frame, _ = decode_at(head + bytes(-len(head) % 64) + bytes(512), 0)
    for tensor in frame.tensors.values():
        tensor.clone()


def _frame_seeds() -> list[bytes]:
    weights = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    first = Frame(FrameKind.FORWARD, 7, samples=3, generation=2, tensors={"h": weights, "t": weights.t()})
    second = Frame(FrameKind.RESULT, -1, train=False, scalars={"loss": 0.5, "n": 3, "ok": True})
    third = Frame(FrameKind.FEED, 1, tensors={"mask": torch.ones(5, dtype=torch.bool), "none": torch.zeros(0, 2)})
    return [encode(first), encode(second) + encode(third), encode(Frame(FrameKind.DONE, 9, checkpoint=3, flush=True))]


def _header_seeds() -> list[bytes]:
    return [seed[8 : 8 + int.from_bytes(seed[4:8], "little")] for seed in _frame_seeds()]


class _OneMessage:
    """A wire on which these bytes come as one message, and then the end."""

    peer = "anna"
    dialled = True

    def __init__(self, data: bytes) -> None:
        self._messages: list[bytes | None] = [data, None]

    async def read(self) -> bytes | None:
        return self._messages.pop(0)

    async def write(self, message: bytes) -> None:
        pass

    async def end(self, refusal: str | None) -> None:
        pass

    async def release(self) -> None:
        pass


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def _link(data: bytes) -> None:
    async def receive() -> None:
        link = Link(_OneMessage(data))
        try:
            while await link.receive() is not None:
                pass
        finally:
            link.abort()
            await link.stream.finished()

    _runner().run(receive())


def _control(*kinds: Any) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        async def receive() -> None:
            refused = None
            for kind in kinds:
                control: Control[Any, Any] = Control(_OneMessage(data), kind)
                try:
                    await control.receive()
                except RavnestError as error:
                    refused = error
                finally:
                    control.abort()
                    await control.stream.finished()
            if refused is not None:
                raise refused

        _runner().run(receive())

    return decode


def _message_seeds() -> list[bytes]:
    order = Deploy(deployment="d1", stages=3, settings_json="{}", next_address="10.0.0.1:7700", generation=4)
    messages = [
        CoordinatorMessage(deploy=order),
        ProviderMessage(failed={"deployment": "d1", "kind": "error", "message": "no", "microbatch": -1}),
        Chunk(data=b"abc", offset=7, header={"name": "checkpoint-3"}, last=True),
        FetchRequest(artifact="graph-0", offset=9),
    ]
    return [message.SerializeToString() for message in messages]


def _report(data: bytes) -> None:
    message = ProviderMessage()
    _control(ProviderMessage)(data)
    message.ParseFromString(data)
    stage = StagePlan("anna", 0, "root", GRAPH, 16, 0.1)
    progress = Progress("fuzz", 1, Ledger(), plan=Plan((stage,), (), 1.0, "because"))
    progress.reports["anna"] = message.report
    progress.losses.extend((record.loss, record.samples) for record in message.report.losses)
    progress.snapshot()
    text = json.dumps(progress.summary("running", "").to_json(), allow_nan=False)
    with _File("summary.json", text.encode()) as path:
        _shown(Summary.read(path))


def _report_seeds() -> list[bytes]:
    losses = [LossRecord(microbatch=3, loss=0.5, samples=8)]
    report = Report(deployment="d1", updates=4, staleness_sum=3, staleness_counts=[1, 3], seconds=2.5, losses=losses)
    odd = Report(updates=1, busy_seconds=float("nan"), seconds=1.0, peak_memory_bytes=2**64 - 1)
    return [ProviderMessage(report=each).SerializeToString() for each in (report, odd)]


@cache
def _admission() -> Admission:
    return Admission.in_memory()


@cache
def _invite() -> SwarmInvite:
    return _admission().invite("127.0.0.1", 7700, uses=None)


def _join(data: bytes) -> None:
    request = JoinRequest()
    _control(JoinRequest)(data)
    request.ParseFromString(data)
    check_version(request)
    split_address(request.address)
    _admission().join(Identity("invite", _invite().token.id), request.certificate_request, request.name)


def _join_seeds() -> list[bytes]:
    request = JoinRequest(
        certificate_request=certificates.certificate_request(_key()),
        name="Anna's PC",
        address="[::1]:7700",
        version=__version__,
        protocol=PROTOCOL_VERSION,
        graph_format=FORMAT_VERSION,
    )
    return [request.SerializeToString()]


# What a stage is made of.

GRAPH = PortableGraph(
    nodes=(
        Node("h", "aten.linear.default", (Ref("inputs"), Ref("w"))),
        Node("b", "aten.batch_norm.default", (Ref("h"), None, None, Ref("m"), Ref("v"), True, 0.1, 1e-5, False)),
        Node("d", "aten.dropout.default", (Ref("b"), 0.5, True), seed=0),
        Node("z", "aten.zeros.default", ((Ref("n"), 4),), {"dtype": torch.float32, "device": Device()}, grad=False),
        Node("s", "aten.split.Tensor", (Ref("d"), 2, 1)),
        Node("y", "py.getitem", (Ref("s"), 0)),
        Node("loss", "aten.mse_loss.default", (Ref("y"), Ref("z"), float("inf"))),
    ),
    inputs=(ValueSpec("inputs", torch.float32, ("s0", 4)), ValueSpec("n", None)),
    parameters=(WeightSpec("w", "layer.weight", torch.float32, (4, 4)),),
    states=tuple(WeightSpec(name, f"norm.{name}", torch.float32, (4,)) for name in ("m", "v")),
    loss="loss",
    metrics={"same": "loss"},
)


def _graph(data: bytes) -> None:
    Program(PortableGraph.from_json(data))


def _weights(data: bytes) -> None:
    reader = WeightsReader(len(data))
    for start in range(0, len(data), 50):
        reader.feed(data[start : start + 50])
    reader.finish()


def _weights_seeds() -> list[bytes]:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "m": torch.tensor([True, False]), "e": torch.zeros(0, 3)}
    return [b"".join(stream_tensors(tensors, {"version": "3"})), b"".join(stream_tensors({}, {}))]


OPTIMIZER = OptimizerSpec("AdamW", {"lr": 0.1, "betas": (0.9, 0.99)})
SCHEDULE = ScheduleSpec("StepLR", {"step_size": 3})


def _settings(data: bytes) -> None:
    settings = StageSettings.from_json(data.decode(errors="replace"))
    optimizer = settings.optimizer_spec().build([torch.nn.Parameter(torch.zeros(2, 2))])
    schedule = settings.schedule_spec()
    if schedule is not None:
        schedule.build(optimizer)


def _settings_seeds() -> list[bytes]:
    settings = StageSettings(optimizer=OPTIMIZER.to_json(), schedule=SCHEDULE.to_json(), clip_norm=1.0)
    return [settings.to_json().encode()]


def _optimizer(data: bytes) -> None:
    OptimizerSpec.from_json(data).build([torch.nn.Parameter(torch.zeros(2, 2))])


def _schedule(data: bytes) -> None:
    ScheduleSpec.from_json(data).build(SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1))


def _optimizer_seeds() -> list[bytes]:
    other = [OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), OptimizerSpec("Adafactor", {})]
    return [spec.to_json().encode() for spec in (OPTIMIZER, *other)]


def _schedule_seeds() -> list[bytes]:
    other = ScheduleSpec("OneCycleLR", {"max_lr": 0.1, "total_steps": 9})
    milestones = ScheduleSpec("MultiStepLR", {"milestones": (2, 4)})
    return [spec.to_json().encode() for spec in (SCHEDULE, other, milestones)]


def _stage() -> Stage:
    weights = {weight.key: torch.ones(weight.shape) for weight in GRAPH.weights}
    return Stage(GRAPH, weights, StageSettings(optimizer=OPTIMIZER.to_json(), schedule=SCHEDULE.to_json()))


def _restore(data: bytes) -> None:
    """Three lines: what a stage kept beside its tensors."""
    lines = dict(zip(("version", "optimizer", "schedule"), data.decode(errors="replace").split("\n"), strict=False))
    _stage().restore({}, lines)


def _restore_seeds() -> list[bytes]:
    metadata = _stage().state()[1]
    return ["\n".join(metadata[name] for name in ("version", "optimizer", "schedule")).encode()]


# Who a peer is.


@cache
def _key() -> certificates.Key:
    return certificates.new_key()


@cache
def _authority() -> SwarmAuthority:
    return SwarmAuthority.new()


@cache
def _node() -> NodeIdentity:
    return NodeIdentity(_key())


def _invite_line(data: bytes) -> None:
    invite = SwarmInvite.parse(data.decode(errors="replace"))
    assert SwarmInvite.parse(invite.line) == invite


def _request(data: bytes) -> None:
    certificates.request_key(data)


def _certificate(data: bytes) -> None:
    authority = _authority().certificate
    certificate = certificates.read_certificate(data)
    certificates.fingerprint(certificate)
    certificates.role(certificate)
    Callers(authority).identify({"x509_pem_cert": [data]})
    _node().adopt(data, authority)


def _certificate_seeds() -> list[bytes]:
    issued = _authority().issue(certificates.certificate_request(_key()), "anna")
    shown = _invite().token.sign_pass(1e9)[1]
    made = [issued, _authority().certificate, shown]
    return [certificates.certificate_der(c) for c in made] + [certificates.certificate_pem(c) for c in made]


def _authority_file(data: bytes) -> None:
    with _File(AUTHORITY_FILE, data) as path:
        SwarmAuthority.open(path.parent)


def _authority_file_seeds() -> list[bytes]:
    authority = _authority()
    return [certificates.key_pem(authority.key) + certificates.certificate_pem(authority.certificate)]


# The run directory: of another program, another version, or a disk that lies.


def _shown(summary: Summary | None, events: list[dict[str, Any]] | None = None) -> None:
    """All that `ravnest status` does with it."""
    paths = RunPaths(Path("run"))
    json.dumps(status._as_json(paths, summary, None, events or []))
    status._print(paths, summary, None, events or [], io.StringIO())


def _summary(data: bytes) -> None:
    with _File("summary.json", data) as path:
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


def _events(data: bytes) -> None:
    with _File("events.jsonl", data) as path:
        _shown(None, read_events(path))


def _events_seeds() -> list[bytes]:
    lines = [{"at": 1.5, "elapsed": 0.1, "kind": "joined", "reason": "anna joined", "provider": "anna"}, {"kind": 3}]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]


def _part() -> bytes:
    tensors, metadata = _stage().state()
    return b"".join(stream_tensors(tensors, metadata))


def _manifest(part: bytes) -> dict[str, Any]:
    described = {"file": "part-0.safetensors", "size": len(part), "sha256": hashlib.sha256(part).hexdigest()}
    state = {"data_state": "", **trained_with(_job())}
    numbers = {"format": 1, "checkpoint": 5, "updates": 5, "samples": 40, "epoch": 0, "position": 5}
    return {**numbers, "parts": [described], "ledger": {"completed": 5}, "state": state}


def _job() -> Any:
    return SimpleNamespace(optimizer_spec=OPTIMIZER, schedule_spec=SCHEDULE)


def _checkpoint(manifest: bytes, part: bytes) -> None:
    with _File("0000000005/checkpoint.json", manifest) as path:
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


class _File:
    """A file of this name with these bytes, in a folder of its own that is used again and again."""

    def __init__(self, name: str, data: bytes) -> None:
        self._path = _folder(name.partition("/")[0] if "/" in name else name) / name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.parent.chmod(0o700)
        self._path.write_bytes(data)
        self._path.chmod(0o600)

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, *_: object) -> None:
        self._path.unlink()


@cache
def _made_folder(process: int, name: str) -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="ravnest-fuzz-", dir=memory if memory.is_dir() else None)


def _folder(name: str) -> Path:
    return Path(_made_folder(os.getpid(), name).name)


def _texts(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


TARGETS = (
    Target("frames", _frames, _frame_seeds),
    Target("frame_header", _frame_header, _header_seeds),
    Target("link", _link, _frame_seeds),
    Target("control", _control(ProviderMessage, CoordinatorMessage, Chunk, FetchRequest), _message_seeds),
    Target("report", _report, _report_seeds),
    Target("join", _join, _join_seeds),
    Target("graph", _graph, lambda: [GRAPH.to_json().encode()], is_json=True),
    Target("weights", _weights, _weights_seeds),
    Target("settings", _settings, _settings_seeds, is_json=True),
    Target("optimizer", _optimizer, _optimizer_seeds, is_json=True),
    Target("schedule", _schedule, _schedule_seeds, is_json=True),
    Target("restore", _restore, _restore_seeds),
    Target("invite", _invite_line, lambda: [_invite().line.encode()]),
    Target("address", lambda data: split_address(data.decode(errors="replace")), _texts("[::1]:7700", "host.org:1")),
    Target("request", _request, lambda: [certificates.certificate_request(_key())]),
    Target("certificate", _certificate, _certificate_seeds),
    Target("authority_file", _authority_file, _authority_file_seeds),
    Target("summary", _summary, _summary_seeds, is_json=True),
    Target("events", _events, _events_seeds, is_json=True),
    Target("checkpoint_manifest", _checkpoint_manifest, lambda: [json.dumps(_manifest(_part())).encode()], True),
    Target("checkpoint_part", _checkpoint_part, lambda: [_part()]),
    Target("data_state", _data_state, lambda: [data_state(SimpleNamespace(generator=torch.Generator())).encode()]),
)


def named(name: str) -> Target:
    (found,) = (target for target in TARGETS if target.name == name)
    return found


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small inputs that ask for much: depth, size, digits, counts."""
    deep = 100_000
    yield "nested lists", b"[" * deep + b"]" * deep
    yield "nested objects", b'{"a":' * deep + b"1" + b"}" * deep
    yield "open lists", b"[" * deep
    yield "digits", b"9" * deep
    yield "exponent", b"1e999999999"
    yield "empty lists", b"[" + b"[]," * deep + b"[]]"
    yield "numbers that are none", b"[NaN, Infinity, -Infinity]"
    yield "half a character", b'"\\ud800"'
    yield "steers a terminal", b'"\\u001b[2J"'
    yield "a pickle", b"cos\nsystem\n(S'true'\ntR."
    yield "zeros", bytes(deep)
    yield "ones", b"\xff" * deep
