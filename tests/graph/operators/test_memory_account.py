"""The memory of a microbatch is computed before it is allocated, and limited to the lent memory."""

import pytest
import torch

from ravnest.errors import LentMemoryError
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.program import Program

KIB = 1 << 10


def program(*nodes: Node, lent: int, loss: str, elements: int = 256) -> Program:
    graph = PortableGraph(
        nodes,
        inputs=(ValueSpec("x", torch.float32, (elements,)),),
        parameters=(WeightSpec("w", "w", torch.float32, (1,)),),
        loss=loss,
    )
    return Program(graph, memory_bytes=lent)


def run(made: Program, elements: int = 256) -> torch.Tensor:
    weight = torch.ones(1, requires_grad=True)
    return made.run({"x": torch.ones(elements)}, {"w": weight}, train=True)[str(made.graph.loss)]  # type: ignore[no-any-return]


def doubling(times: int) -> list[Node]:
    return [Node(f"n{i}", "aten.cat.default", ((Ref(f"n{i - 1}" if i else "x"),) * 2,)) for i in range(times)]


def test_ten_nodes_cannot_take_the_machine() -> None:
    made = program(*doubling(40), lent=1 << 30, loss="n39")
    with pytest.raises(
        LentMemoryError, match=r"node 'n\d+' \(aten.cat.default\) would take .* lend more with --memory"
    ):
        run(made)


def test_a_refused_node_has_taken_nothing() -> None:
    made = program(Node("z", "aten.zeros.default", ((1 << 36,),)), lent=1 << 20, loss="z")
    with pytest.raises(LentMemoryError, match="node 'z'"):
        run(made)


def test_what_is_alive_counts_together_and_what_was_dropped_does_not() -> None:
    chain = [Node(f"n{i}", "aten.add.Tensor", (Ref(f"n{i - 1}" if i else "x"), 1.0)) for i in range(50)]
    run(program(*chain, lent=4 * KIB, loss="n49"))
    kept = [*chain, Node("all", "aten.stack.default", (tuple(Ref(n.name) for n in chain),))]
    with pytest.raises(LentMemoryError):
        run(program(*kept, lent=20 * KIB, loss="all"))


def test_what_autograd_keeps_counts_although_the_graph_dropped_it() -> None:
    first = Node("n0", "aten.mul.Tensor", (Ref("x"), Ref("w")))
    chain = [first, *[Node(f"n{i}", "aten.exp.default", (Ref(f"n{i - 1}"),)) for i in range(1, 50)]]
    with pytest.raises(LentMemoryError):
        run(program(*chain, lent=20 * KIB, loss="n49"))
    with torch.no_grad():
        run(program(*chain, lent=20 * KIB, loss="n49"))


def test_a_view_counts_by_its_elements() -> None:
    with pytest.raises(LentMemoryError, match="made a tensor of 4"):
        run(program(Node("v", "aten.expand.default", (Ref("w"), (1 << 30,))), lent=1 << 20, loss="v"))


def test_every_size_of_a_batch_is_checked_once() -> None:
    made = program(*doubling(3), lent=64 * KIB, loss="n2")
    assert run(made).numel() == 2048
    assert run(made).numel() == 2048
    with pytest.raises(LentMemoryError):
        run(made, elements=8192)


def test_sizes_that_follow_from_values_are_checked_every_time() -> None:
    node = Node("o", "aten.one_hot.default", (Ref("x"),))
    graph = PortableGraph((node,), inputs=(ValueSpec("x", torch.int64, (2,)),), loss="o")
    made = Program(graph, memory_bytes=64 * KIB)
    for _ in range(2):
        assert made.run({"x": torch.tensor([1, 5])}, {}, train=True)["o"].shape == (2, 6)
        with pytest.raises(LentMemoryError):
            made.run({"x": torch.tensor([1, 1 << 40])}, {}, train=True)
