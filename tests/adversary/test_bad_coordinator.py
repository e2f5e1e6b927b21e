"""A coordinator that means harm, and a real provider in a process of its own that has joined it.

The provider refuses each order with one sentence, stays, and then takes an honest one.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ravnest.coordinator.swarm.artifacts import Artifact
from ravnest.engine.settings import StageSettings
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.weights import stream_tensors
from ravnest.net.v1.control_pb2 import ArtifactRef, CoordinatorMessage, Deploy, ProviderMessage
from ravnest.spec import OptimizerSpec, ScheduleSpec
from tests.e2e.command import Running
from tests.swarms.in_process import A_PICKLE, LocalSwarm, run

MEMORY_BYTES = 300 << 20
"""By this much a provider may grow while it refuses everything below."""

GRAPH = PortableGraph(
    nodes=(
        Node("h", "aten.linear.default", (Ref("inputs"), Ref("w"))),
        Node("loss", "aten.mse_loss.default", (Ref("h"), Ref("targets"))),
    ),
    inputs=(ValueSpec("inputs", torch.float32, ("s0", 4)), ValueSpec("targets", torch.float32, ("s0", 4))),
    parameters=(WeightSpec("w", "layer.weight", torch.float32, (4, 4)),),
    loss="loss",
)


class Order:
    """What is sent to the provider: honest, until a test changes it."""

    def __init__(self) -> None:
        self.graph: Any = json.loads(GRAPH.to_json())
        self.text: bytes | None = None
        self.tensors = {"weight:layer.weight": torch.ones(4, 4)}
        self.metadata: dict[str, str] = {}
        self.weights: bytes | None = None
        optimizer, schedule = OptimizerSpec("SGD", {"lr": 0.1}), ScheduleSpec("StepLR", {"step_size": 3})
        self.settings = StageSettings(optimizer=optimizer.to_json(), schedule=schedule.to_json()).to_json()
        self.announced: dict[str, dict[str, Any]] = {"graph": {}, "weights": {}}
        """What the order says of an artifact, where that is not the truth."""

    def deploy(self, swarm: LocalSwarm, name: str) -> Deploy:
        order = Deploy(deployment=name, stage=0, stages=1, settings_json=self.settings, generation=1)
        text = self.text if self.text is not None else json.dumps(self.graph).encode()
        weights = self.weights
        if weights is None:
            weights = b"".join(stream_tensors(self.tensors, self.metadata))
        for field, data in (("graph", text), ("weights", weights)):
            swarm.swarm.artifacts[field] = Artifact(
                field, "", len(data), lambda offset, data=data: iter([data[offset:]])
            )
            truth = {"id": field, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
            getattr(order, field).CopyFrom(ArtifactRef(**{**truth, **self.announced[field]}))
        return order


class Victim:
    """A provider's process and the coordinator it has joined."""

    def __init__(self, swarm: LocalSwarm, process: Running) -> None:
        self.swarm = swarm
        self.process = process
        self.orders = 0

    def answer(self, order: Order) -> ProviderMessage:
        """What it says to an order."""
        self.orders += 1
        name = f"d{self.orders}"
        found: list[ProviderMessage] = []

        def has_answered() -> bool:
            for _, message in self.swarm.told.messages:
                body = getattr(message, message.WhichOneof("body") or "leaving")
                if message.WhichOneof("body") in ("ready", "failed") and body.deployment == name:
                    found.append(message)
            return bool(found)

        async def send() -> None:
            deploy = CoordinatorMessage(deploy=order.deploy(self.swarm, name))
            await self.swarm.swarm.tell("victim", deploy)
            await self.swarm.until(lambda: has_answered() or bool(self.swarm.told.gone))

        run(send())
        assert self.swarm.told.gone == [], "the provider went away"
        return found[0]

    def memory_bytes(self) -> int:
        return psutil.Process(self.process.process.pid).memory_info().rss


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("victim")
    kept = os.environ.get("XDG_DATA_HOME")
    os.environ["XDG_DATA_HOME"] = str(folder / "data")
    swarm = LocalSwarm()

    async def start() -> None:
        swarm.port = await swarm.swarm.start()

    run(start())
    line = swarm.invite().line
    with Running("join", line, "--name", "victim", "--listen", "127.0.0.1:0", folder=folder, warm=True) as process:
        run(swarm.swarm.members.changes.until(lambda: "victim" in swarm.connected()))
        yield Victim(swarm, process)
        run(swarm.close())
        assert "Traceback" not in process.to_the_end()
    if kept is None:
        del os.environ["XDG_DATA_HOME"]
    else:
        os.environ["XDG_DATA_HOME"] = kept


def graph(*path: str | int, value: Any) -> Callable[[Order], None]:
    """An order with one value of its graph changed."""

    def change(order: Order) -> None:
        place = order.graph
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def given(**fields: Any) -> Callable[[Order], None]:
    """An order with these parts."""

    def change(order: Order) -> None:
        for name, value in fields.items():
            setattr(order, name, value)

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def settings(**fields: Any) -> Callable[[Order], None]:
    def change(order: Order) -> None:
        order.settings = json.dumps({**json.loads(order.settings), **fields})

    return change


def announced(artifact: str, **fields: Any) -> Callable[[Order], None]:
    def change(order: Order) -> None:
        order.announced[artifact] = fields

    return change


def weights_of(header: bytes, data: bytes = b"") -> Callable[[Order], None]:
    return given(weights=struct.pack("<Q", len(header)) + header + data)


def both(*changes: Callable[[Order], None]) -> Callable[[Order], None]:
    def change(order: Order) -> None:
        for each in changes:
            each(order)

    return change


OPERATOR = ("nodes", 0, "op")
HUGE_TENSOR = json.dumps({"w": {"dtype": "U8", "shape": [1 << 60], "data_offsets": [0, 1 << 60]}}).encode()
TRICKS: dict[str, tuple[Callable[[Order], None], str]] = {
    "an operator that reads files": (
        graph(*OPERATOR, value="aten.from_file.default"),
        "operator 'aten.from_file.default' is not on the allow-list",
    ),
    "an operator that is Python": (graph(*OPERATOR, value="py.eval"), "operator 'py.eval' is not on the allow-list"),
    "a function for an operator": (graph(*OPERATOR, value="os.system"), "operator 'os.system' is not on the allow"),
    "a custom operator": (graph(*OPERATOR, value="evil.run.default"), "is not on the allow-list"),
    "an operator on another's memory": (graph(*OPERATOR, value="aten.as_strided.default"), "is not on the allow-list"),
    "an overload that writes elsewhere": (graph(*OPERATOR, value="aten.add.out"), "is not on the allow-list"),
    "an element type as a number": (
        graph("nodes", 0, value={"name": "h", "op": "aten.zeros.default", "args": [[2]], "kwargs": {"dtype": 128}}),
        "gives aten.zeros.default as 'dtype' 128, which is no element type",
    ),
    "a device of the provider's": (
        graph(
            "nodes", 0, value={"name": "h", "op": "aten.ones.default", "args": [[2]], "kwargs": {"device": "cuda:0"}}
        ),
        "names a device; the stage chooses it",
    ),
    "a path for a weight": (graph("parameters", 0, "key", value="../../.ssh/id"), "is not a valid name for a weight"),
    "dots in a weight's name": (graph("parameters", 0, "key", value="a..b"), "is not a valid name for a weight"),
    "a path for a value": (graph("nodes", 0, "name", value="../h"), "is not a valid name for a value"),
    "a value before it exists": (graph("nodes", 0, "args", 0, value={"ref": "loss"}), "uses 'loss' before it exists"),
    "a cycle": (graph("nodes", 0, "args", 0, value={"ref": "h"}), "uses 'h' before it exists"),
    "nested arguments": (graph("nodes", 0, "args", value=[nested(50)]), "nested more than 8 deep"),
    "a bomb of nested lists": (given(text=b"[" * 1_000_000 + b"]" * 1_000_000), "is nested too deep"),
    "a bomb of empty lists": (given(text=b"[" + b"[]," * 5_000_000 + b"[]]"), "it holds more than 8000000 values"),
    "a number without end": (given(text=b"9" * 1_000_000), "is not valid JSON"),
    "a pickle for a graph": (given(text=A_PICKLE), "the portable graph is not valid JSON"),
    "a tensor larger than there is memory": (
        graph("parameters", 0, "shape", value=[2**39, 2**39]),
        "the weights for layer.weight are missing or do not have the shape the graph says",
    ),
    "a graph of a terabyte": (announced("graph", size_bytes=1 << 40), "the stage's graph has 1099511627776 bytes"),
    "a graph longer than announced": (announced("graph", size_bytes=100), "is larger than the 100 bytes announced"),
    "a graph with another hash": (announced("graph", sha256="0" * 64), "the artifact graph arrived damaged"),
    "weights with another hash": (announced("weights", sha256="0" * 64), "the artifact weights arrived damaged"),
    "weights larger than announced": (announced("weights", size_bytes=150), "is larger than the 150 bytes announced"),
    "weights smaller than announced": (announced("weights", size_bytes=1 << 20), "of its .* bytes of data"),
    "weights of an exabyte": (weights_of(HUGE_TENSOR), "cover 1152921504606846976 of its 0 bytes"),
    "an exabyte, announced": (
        both(weights_of(HUGE_TENSOR), announced("weights", size_bytes=1 << 62)),
        "has weights of .* and this provider lends",
    ),
    "a header of an exabyte": (given(weights=b"\xff" * 64), "announces a header of 18446744073709551615 bytes"),
    "a pickle for weights": (given(weights=A_PICKLE * 4), "a weights stream of .* announces a header"),
    "a pickle in a header": (weights_of(A_PICKLE), "the header of a weights stream is not valid JSON"),
    "an artifact of somebody else": (
        # With a hash that no artifact has: one that is kept already would not be asked for.
        announced("graph", id="../identity/authority.pem", sha256="0" * 64),
        "there is no artifact '../identity/authority.pem' for victim here",
    ),
    "a pickle for settings": (given(settings=A_PICKLE.decode()), "the stage's settings are not valid JSON"),
    "a function for an optimizer": (
        settings(optimizer='{"name": "os.system", "arguments": {}}'),
        "os.system is not in torch.optim",
    ),
    "a schedule that is code": (
        settings(schedule='{"name": "LambdaLR", "arguments": {"lr_lambda": "x"}}'),
        "LambdaLR needs a Python function, which providers never run",
    ),
    "settings without end": (given(settings="[" * 1_000_000), "is nested too deep|more than 100000 values"),
    "a state that replaces methods": (
        given(metadata={"version": "1", "optimizer": '{"groups": 3, "values": {}}', "schedule": '{"step": 3}'}),
        "the saved state of a stage cannot be read",
    ),
    "a pickle for a state": (
        given(metadata={"version": A_PICKLE.decode(), "optimizer": "{}", "schedule": "{}"}),
        "the saved state of a stage cannot be read",
    ),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_coordinator_that_sends(victim: Victim, trick: str) -> None:
    change, words = TRICKS[trick]
    order = Order()
    change(order)
    before = victim.memory_bytes()
    answer = victim.answer(order)
    assert answer.failed.kind == "deploy", answer
    assert re.search(words, answer.failed.message), answer.failed.message
    assert answer.failed.message.isprintable() and len(answer.failed.message) < 2500
    assert victim.memory_bytes() - before < MEMORY_BYTES
    assert not Path("/tmp/ravnest-was-here").exists()


def test_afterwards_an_honest_order_is_taken(victim: Victim) -> None:
    assert victim.answer(Order()).WhichOneof("body") == "ready"


def test_a_reason_to_stop_cannot_steer_the_providers_terminal(victim: Victim) -> None:
    async def stop() -> None:
        await victim.swarm.swarm.stop("\x1b[2Jyou have won\r\n$ rm -rf /")

    run(stop())
    said = victim.process.to_the_end()
    assert "you have won" in said and "\x1b" not in said and "\n$" not in said
