"""Text of an artifact, such as a stage's graph, as a sink for its bytes."""

from ravnest.errors import GraphError
from ravnest.graph.portable import PortableGraph
from ravnest.graph.portable_reader import read_graph
from ravnest.graph.state_size import MAX_GRAPH_BYTES


class ArtifactText:
    """Collects the text of an artifact. GraphError with its `name` when it is larger than `max_bytes`."""

    def __init__(self, name: str, size_bytes: int, max_bytes: int) -> None:
        if size_bytes > max_bytes:
            raise GraphError(f"{name} has {size_bytes} bytes, more than {max_bytes}")
        self._parts: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        self._parts.append(chunk)

    @property
    def content(self) -> bytes:
        return b"".join(self._parts)


class GraphText(ArtifactText):
    """Collects the text of a graph. GraphError when it is larger than any graph may be."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__("the stage's graph", size_bytes, MAX_GRAPH_BYTES)

    def graph(self) -> PortableGraph:
        """The graph; GraphError when the text is not one."""
        return read_graph(self.content)
