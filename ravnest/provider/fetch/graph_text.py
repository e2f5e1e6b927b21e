"""Text of a stage's graph, as a sink for its artifact."""

from ravnest.errors import GraphError
from ravnest.graph.portable import PortableGraph
from ravnest.graph.portable_reader import read_graph
from ravnest.graph.state_size import MAX_GRAPH_BYTES


class GraphText:
    """Collects the text of a graph. GraphError when it is larger than any graph may be."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes > MAX_GRAPH_BYTES:
            raise GraphError(f"the stage's graph has {size_bytes} bytes, more than {MAX_GRAPH_BYTES}")
        self._parts: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        self._parts.append(chunk)

    def graph(self) -> PortableGraph:
        """The graph; GraphError when the text is not one."""
        return read_graph(b"".join(self._parts))
