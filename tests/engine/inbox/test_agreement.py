"""The messages about one microbatch agree, in any order of arrival, or nothing is computed."""

from typing import Any

import pytest
import torch

from ravnest.engine.inbox.agreement import MisfitError, backward_misfit
from ravnest.engine.inbox.applied import Applied
from ravnest.engine.inbox.inbox import Inbox
from ravnest.engine.messages import Message
from ravnest.engine.schedule import ReadyCounts, Task
from ravnest.engine.settings import StageSettings
from ravnest.errors import PeerError
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.microbatch import Marks
from ravnest.spec import OptimizerSpec

LEAF = PortableGraph(
    nodes=(
        Node("found", "aten.linear.default", (Ref("h"), Ref("w"))),
        Node("loss", "aten.mse_loss.default", (Ref("found"), Ref("targets"))),
    ),
    inputs=(ValueSpec("targets", torch.float32, ("s0", 4)),),
    receives=(ValueSpec("h", torch.float32, ("s0", 4), True),),
    parameters=(WeightSpec("w", "w", torch.float32, (4, 4)),),
    loss="loss",
)
STEM = PortableGraph(
    nodes=(Node("found", "aten.linear.default", (Ref("h"), Ref("w"))),),
    receives=(ValueSpec("h", torch.float32, ("s0", 4), True),),
    sends=(ValueSpec("found", torch.float32, ("s0", 4), True),),
    parameters=(WeightSpec("w", "w", torch.float32, (4, 4)),),
)


def an_inbox(graph: PortableGraph) -> Inbox:
    settings = StageSettings(optimizer=OptimizerSpec("SGD", {"lr": 0.1}).to_json(), stage=1, stages=3)
    return Inbox(graph, settings, Applied(), announced=True)


def marks(**more: Any) -> Marks:
    return Marks(**{"samples": 8, "updates": 3, "round": 1, **more})


def fed(graph: PortableGraph, size: int = 8, **more: Any) -> Message:
    values = {"targets": torch.zeros(size, 4)} if graph.inputs else {}
    return Message(0, values, marks=marks(**more), sizes={"s0": 8})


def sent(size: int = 8, **more: Any) -> Message:
    return Message(0, {"h": torch.zeros(size, 4)}, marks=marks(**more))


@pytest.mark.parametrize("graph", [LEAF, STEM], ids=["leaf", "stem"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (sent(7), r"h has the shape \(7, 4\), whose dimension 0 \(s0\) is 8"),
        (sent(samples=9), "have samples 9, but its feed has 8"),
        (sent(updates=4), "have updates 4"),
        (sent(checkpoint=7), "have checkpoint 7"),
        (sent(flush=True), "have flush True"),
        (sent(round=2), "have round 2"),
        (sent(fragment=2), "have fragment 2"),
        (sent(replica=2), "have replica 2"),
        (sent(train=False, updates=0, round=0), "have train False, but its feed has True"),
    ],
)
def test_activations_that_do_not_fit_the_feed_are_refused(graph: PortableGraph, wrong: Message, words: str) -> None:
    first = an_inbox(graph)
    first.feed(fed(graph))
    with pytest.raises(MisfitError, match=words):
        first.receive_forward(wrong)
    # The other way round: it is still the activations that cannot be, not the feed.
    second = an_inbox(graph)
    second.receive_forward(wrong)
    with pytest.raises(MisfitError, match=words):
        second.feed(fed(graph))
    assert not any(first.ready()) and not any(second.ready())


@pytest.mark.parametrize("graph", [LEAF, STEM], ids=["leaf", "stem"])
def test_nothing_is_computed_before_the_feed_has_arrived(graph: PortableGraph) -> None:
    inbox = an_inbox(graph)
    inbox.receive_forward(sent())
    assert not any(inbox.ready())
    inbox.feed(fed(graph))
    assert inbox.ready() == ReadyCounts(backwards=0, forwards=1, evaluations=0)
    assert inbox.take(Task.FORWARD).microbatch == 0


def test_the_marks_are_those_of_the_feed() -> None:
    inbox = an_inbox(LEAF)
    inbox.feed(fed(LEAF, checkpoint=5))
    inbox.receive_forward(sent(checkpoint=5))
    joined = inbox.take(Task.FORWARD)
    assert (joined.marks.checkpoint, set(joined.values)) == (5, {"h", "targets"})


def test_a_feed_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(PeerError, match="the feed of microbatch 0 does not agree with itself: targets") as caught:
        an_inbox(LEAF).feed(fed(LEAF, size=7))
    assert not isinstance(caught.value, MisfitError)


def test_a_gradient_of_another_shape_than_its_activation_is_refused() -> None:
    shapes = {"h": torch.Size((8, 4)), "k": torch.Size((8,))}
    assert backward_misfit(shapes, Message(0, {"h": torch.zeros(8, 4)})) == ""
    wrong = backward_misfit(shapes, Message(0, {"h": torch.zeros(8, 4), "k": torch.zeros(7)}))
    assert wrong == "the gradient of k for microbatch 0 has the shape (7,), and (8,) was sent"
