"""Process of benchmarks.scale that counts what crosses the cuts of a model, from the graph that Ravnest captures.

It reads lists of places, as the event `planned` has them, as one line of JSON, and prints the figures of each stage of
each. What crosses is counted as follows:

- activations, forward, and the gradients of those that need one, backward;
- for a weight that both sides of a cut use, what is least: the weight itself, or the result of one of its uses, as if
  its owner computed that use for the other side;
- the rows of a tied embedding that the leaf looks up for the root, as what the leaf sends.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import torch

from benchmarks.scale_parts.bounds import StageFigures
from benchmarks.scale_parts.tasks import TASKS
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.lookups import name_ahead
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.profile import NodeCost, profile


def main() -> None:
    task = TASKS[sys.argv[1]]
    batches = task.batches()[:2]
    captured = capture(task.build(), task.loss, {}, batches)
    # A layer's saved memory counts, not its time: one thread is enough.
    torch.set_num_threads(1)
    costs = profile(captured.graph, captured.weights, captured.sample, task.samples).nodes
    places = json.loads(sys.stdin.readline())
    print(json.dumps([[asdict(stage) for stage in figures(captured.graph, costs, each)] for each in places]))


def figures(graph: PortableGraph, costs: Mapping[str, NodeCost], places: Sequence[int]) -> list[StageFigures]:
    """The figures of the stages of a graph that is cut at these places."""
    stages = split(graph, places)
    row = sum(_output_bytes([value.name], costs) for value in stages[0].rows)
    crossing = [(row, row), *(crossing_bytes(graph, costs, place) for place in places), (row, row)]
    found = []
    for number, stage in enumerate(stages):
        forward, backward = crossing[number + 1]
        first = {parameter.name: parameter.key for parameter in stage.parameters}
        ahead = {name_ahead(value.name) for value in stage.lookups}
        own = [node for node in stage.nodes if node.name not in ahead]
        begins = next(first[name] for node in own for name in node.references() if name in first)
        found.append(
            StageFigures(
                begins=begins,
                saved_bytes=sum(costs[node.name].saved_bytes for node in stage.nodes if node.name in costs),
                received_bytes=crossing[number][0],
                sent_bytes=forward,
                returned_bytes=backward,
            )
        )
    return found


def crossing_bytes(graph: PortableGraph, costs: Mapping[str, NodeCost], place: int) -> tuple[int, int]:
    """Bytes that have to cross this place of the model, forward and backward."""
    forward = backward = 0
    constant = _from_weights(graph)
    for value in layout(graph).crossing[place]:
        least = _output_bytes([value.name], costs)
        if value.name in constant:
            used = [node.name for node in graph.nodes if value.name in node.references()]
            least = min((_output_bytes([name], costs) for name in _first_results(graph, used, constant)), default=0)
            own = [p for p in graph.parameters if p.name == value.name]
            least = min([least, *(torch.Size(p.shape).numel() * p.dtype.itemsize for p in own)])
        forward += least
        backward += least if _needs_gradient(value) else 0
    return forward, backward


def _from_weights(graph: PortableGraph) -> set[str]:
    """Parameters, and values that are computed from parameters alone, such as a transposed weight."""
    found = {parameter.name for parameter in graph.parameters}
    for node in graph.nodes:
        references = set(node.references())
        if references and references <= found:
            found.add(node.name)
    return found


def _first_results(graph: PortableGraph, names: Sequence[str], constant: set[str]) -> list[str]:
    """The values that depend on a microbatch among these, and among what is computed from the others."""
    found, left = [], list(names)
    while left:
        name = left.pop()
        if name not in constant:
            found.append(name)
        else:
            left += [node.name for node in graph.nodes if name in node.references()]
    return found


def _output_bytes(names: Iterable[str], costs: Mapping[str, NodeCost]) -> int:
    return sum(costs[name].output_bytes for name in names if name in costs)


def _needs_gradient(value: ValueSpec) -> bool:
    return value.needs_grad


if __name__ == "__main__":
    main()
