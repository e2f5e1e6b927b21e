"""A tensor keeps its order in memory over the wire: operators choose kernels by it, and cuts must change no digit."""

import pytest
import torch

from ravnest.errors import PeerError
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.v1 import frame_pb2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).transpose(1, 2),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).view(4, 6)[:, ::2].t(),
        torch.arange(6).view(2, 3).t(),
    ],
    ids=["transposed", "permuted", "channels-last", "sliced and transposed", "integers"],
)
def test_a_tensor_arrives_with_its_dimensions_in_the_same_order_of_memory(tensor: torch.Tensor) -> None:
    came = _sent(tensor)
    assert came.shape == tensor.shape
    assert torch.equal(came, tensor)
    # A frame keeps the same of a tensor's layout as `clone`.
    assert came.stride() == tensor.clone(memory_format=torch.preserve_format).stride()


@pytest.mark.parametrize(
    "tensor", [torch.arange(3.0).expand(4, 3), torch.ones(()).expand(2, 2), torch.ones(2, 6)[:, ::2]]
)
def test_a_tensor_without_an_order_of_its_own_arrives_contiguous(tensor: torch.Tensor) -> None:
    came = _sent(tensor)
    assert torch.equal(came, tensor)
    assert came.is_contiguous()


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), (1, 0, 2), (2**31, 0)])
def test_an_order_that_is_none_is_refused(order: tuple[int, ...]) -> None:
    spec = frame_pb2.TensorSpec(name="x", dtype=frame_pb2.DTYPE_FLOAT32, shape=(2, 2), order=order)
    header = frame_pb2.FrameHeader(kind=frame_pb2.FRAME_KIND_FORWARD, tensors=[spec]).SerializeToString()
    head = b"RVN\x01" + len(header).to_bytes(4, "little") + header
    head += bytes(-len(head) % 64)
    with pytest.raises(PeerError, match="dimensions lie in the order"):
        decode(head + bytes(64))


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    return decode(encode(Frame(FrameKind.FORWARD, 0, tensors={"x": tensor}))).tensors["x"]
