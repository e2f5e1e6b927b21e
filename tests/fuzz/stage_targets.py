"""Targets for the parts of a stage: its graph, weights, settings and saved state."""

import torch
from torch.optim import SGD

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.portable import Device, Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.portable_reader import read_graph
from ravnest.graph.program import Program
from ravnest.graph.weights import WeightsReader, stream_tensors
from ravnest.spec import OptimizerSpec, ScheduleSpec
from tests.fuzz.rule import Target

GRAPH = PortableGraph(
    nodes=(
        Node("h", "aten.linear.default", (Ref("inputs"), Ref("w"))),
        Node("b", "aten.batch_norm.default", (Ref("h"), None, None, Ref("m"), Ref("v"), True, 0.1, 1e-5, False)),
        Node("d", "aten.dropout.default", (Ref("b"), 0.5, True), seed=0),
        Node("z", "aten.zeros.default", ((Ref("n"), 4),), {"dtype": torch.float32, "device": Device()}, grad=False),
        Node("s", "aten.split.Tensor", (Ref("d"), 2, 1)),
        Node("y", "py.getitem", (Ref("s"), 0)),
        Node("c", "aten.clamp.default", (Ref("y"), None, float("inf"))),
        Node("loss", "aten.mse_loss.default", (Ref("c"), Ref("z"), 1)),
    ),
    inputs=(ValueSpec("inputs", torch.float32, ("s0", 4)), ValueSpec("n", None)),
    parameters=(WeightSpec("w", "layer.weight", torch.float32, (4, 4)),),
    states=tuple(WeightSpec(name, f"norm.{name}", torch.float32, (4,)) for name in ("m", "v")),
    loss="loss",
    metrics={"same": "loss"},
)


def _graph(data: bytes) -> None:
    Program(read_graph(data))


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


def a_stage() -> Stage:
    weights = {weight.key: torch.ones(weight.shape) for weight in GRAPH.weights}
    return Stage(GRAPH, weights, StageSettings(optimizer=OPTIMIZER.to_json(), schedule=SCHEDULE.to_json()))


def _restore(data: bytes) -> None:
    """Three lines: the saved state of a stage without its tensors."""
    lines = dict(zip(("version", "optimizer", "schedule"), data.decode(errors="replace").split("\n"), strict=False))
    a_stage().restore({}, lines)


def _restore_seeds() -> list[bytes]:
    metadata = a_stage().state()[1]
    return ["\n".join(metadata[name] for name in ("version", "optimizer", "schedule")).encode()]


TARGETS = (
    Target("graph", _graph, lambda: [GRAPH.to_json().encode()], is_json=True),
    Target("weights", _weights, _weights_seeds),
    Target("settings", _settings, _settings_seeds, is_json=True),
    Target("optimizer", _optimizer, _optimizer_seeds, is_json=True),
    Target("schedule", _schedule, _schedule_seeds, is_json=True),
    Target("restore", _restore, _restore_seeds),
)
