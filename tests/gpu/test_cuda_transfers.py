"""On a GPU: frames leave and arrive beside the computation, whole, and the same codec gives the same."""

import asyncio
from pathlib import Path

import pytest
import torch

from ravnest.codecs.codec import CODECS
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.links.cuda_copies import DeviceCopies
from ravnest.provider.links.pack_threads import Outgoing, Packing
from ravnest.provider.links.tensor_codec import coded, decoded
from ravnest.settings import ACTIVATION_CODECS
from tests.e2e.codec_runs import links, trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and there is none here")

CUDA = torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")


def frame(tensor: torch.Tensor) -> Frame:
    return Frame(FrameKind.FORWARD, 1, tensors={"x": tensor})


@pytest.mark.parametrize("name", ACTIVATION_CODECS)
@pytest.mark.parametrize("count", [256, 1000, 300_001])
def test_a_codec_gives_the_same_bytes_and_values_on_a_gpu(name: str, count: int) -> None:
    codec = CODECS[name]
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    here, there = codec.encode(values), codec.encode(values.to(CUDA))
    assert torch.equal(codec.decode(here, count), codec.decode(here.to(CUDA), count).cpu())
    # A quotient that lies between two steps may be rounded either way where a device divides otherwise.
    assert (here != there.cpu()).sum() <= max(2, count // 1000)


@pytest.mark.parametrize("name", ACTIVATION_CODECS)
def test_what_leaves_is_what_was_computed_though_computing_goes_on(name: str) -> None:
    """The tensor is the result of much work that is not done when it is handed over, and its memory is used again at
    once when it is let go of."""
    transfers, codec = DeviceCopies(CUDA), CODECS[name]

    async def run() -> None:
        threads = Packing(2, transfers)
        matrix = torch.randn(1024, 1024, device=CUDA) / 32
        for number in range(20):
            result = torch.full((1024, 1024), float(number + 1), device=CUDA)
            for _ in range(30):
                result = (matrix @ result).mul_(0).add_(number + 1)
            outgoing = Outgoing(frame(result), transfers.mark())
            del result
            packing = asyncio.create_task(threads.pack(outgoing, codec))
            del outgoing
            torch.full((1024, 1024), -1.0, device=CUDA)
            packed = await packing
            found = decoded(decode(packed.data), codec).tensors["x"]
            assert torch.allclose(found, torch.tensor(float(number + 1)), rtol=0.01)
        threads.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ACTIVATION_CODECS)
def test_what_arrives_is_on_the_device_and_whole(name: str) -> None:
    transfers, codec = DeviceCopies(CUDA), CODECS[name]

    async def run() -> None:
        threads = Packing(2, transfers)
        for number in range(20):
            given = coded(
                frame(torch.full((2, 3, 64, 64), float(number + 1)).to(memory_format=torch.channels_last)), codec
            )
            found = (await threads.unpack(given, codec, lambda frame: None)).tensors["x"]
            assert found.device == CUDA and found.is_contiguous(memory_format=torch.channels_last)
            # As the stage does: on its own stream, at once.
            assert torch.allclose(found.sum() / found.numel(), torch.tensor(number + 1.0, device=CUDA), rtol=0.01)
        threads.close()

    asyncio.run(run())


def test_the_thread_that_computes_does_not_wait_for_the_copy() -> None:
    transfers = DeviceCopies(CUDA)
    matrix = torch.randn(4096, 4096, device=CUDA)
    torch.cuda.synchronize()
    for _ in range(50):
        matrix = matrix @ matrix
        matrix /= matrix.norm()
    mark = transfers.mark()
    assert mark is not None and not mark.query()
    torch.cuda.synchronize()
    assert mark.query()


@pytest.mark.parametrize("codec", ["float32", "lossless", "int8"])
def test_a_run_on_a_gpu_with_a_codec_learns_as_one_on_processors(codec: str, tmp_path: Path) -> None:
    with EmbeddedSwarm(3, devices=("cuda:0",)) as gpu:
        on_gpu = trained(gpu, tmp_path / "gpu", codec=codec)
    with EmbeddedSwarm(3) as processors:
        on_processors = trained(processors, tmp_path / "cpu", codec=codec)
    assert on_gpu["eval"]["loss"] == pytest.approx(on_processors["eval"]["loss"], abs=0.01)
    assert {link["codec"] for link in links(on_gpu)} == {codec}
