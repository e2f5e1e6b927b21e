"""Frames are coded and packed off the network's loop, in order, and one direction does not wait for another."""

import asyncio
import threading

import pytest
import torch

from ravnest.codecs.codec import CODECS
from ravnest.errors import PeerError
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.links import pack_threads as packing
from ravnest.provider.links.cuda_copies import DeviceCopies
from ravnest.provider.links.pack_threads import AT_ONCE_BYTES, Outgoing, Packing

INT8 = CODECS["int8"]
LARGE, SMALL = torch.ones(AT_ONCE_BYTES // 4), torch.ones(AT_ONCE_BYTES // 4 - 1)


def outgoing(number: int, tensor: torch.Tensor) -> Outgoing:
    return Outgoing(Frame(FrameKind.FORWARD, number, tensors={"x": tensor}))


def packed_frame(number: int) -> Frame:
    found = packing.coded(outgoing(number, LARGE).frame, INT8)
    return decode(packing.encode(found))


@pytest.mark.parametrize("tensor", [LARGE, SMALL], ids=["large", "small"])
def test_a_frame_comes_back_and_its_bytes_are_counted(tensor: torch.Tensor) -> None:
    async def test() -> None:
        threads = Packing(2, DeviceCopies(torch.device("cpu")))
        packed = await threads.pack(outgoing(3, tensor), INT8)
        assert packed.saved_bytes == tensor.nbytes - INT8.size_bytes(tensor.numel())
        checked: list[int] = []
        frame = await threads.unpack(decode(packed.data), INT8, lambda frame: checked.append(frame.microbatch))
        assert torch.allclose(frame.tensors["x"], tensor, rtol=0.01) and checked == [3]
        threads.close()

    asyncio.run(test())


@pytest.mark.parametrize(("tensor", "on_the_loop"), [(LARGE, False), (SMALL, True)], ids=["large", "small"])
def test_large_frames_leave_the_loop_free_and_small_ones_stay_on_it(
    tensor: torch.Tensor, on_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        where: list[threading.Thread] = []
        encode = packing.encode

        def watched(frame: Frame) -> bytes:
            where.append(threading.current_thread())
            return encode(frame)

        monkeypatch.setattr(packing, "encode", watched)
        threads = Packing(2, DeviceCopies(torch.device("cpu")))
        await threads.pack(outgoing(1, tensor), INT8)
        assert (where == [threading.main_thread()]) is on_the_loop
        threads.close()

    asyncio.run(test())


def test_one_direction_goes_on_while_another_is_held_up() -> None:
    async def test() -> None:
        threads = Packing(2, DeviceCopies(torch.device("cpu")))
        go_on = threading.Event()
        held = asyncio.create_task(threads.unpack(packed_frame(1), INT8, lambda frame: _wait(go_on)))
        for number in range(5):
            assert (await threads.pack(outgoing(number, LARGE), INT8)).data
        assert not held.done()
        go_on.set()
        assert (await held).microbatch == 1
        threads.close()

    asyncio.run(test())


def test_what_a_check_finds_is_raised() -> None:
    async def test() -> None:
        def check(frame: Frame) -> None:
            raise PeerError("not this one")

        threads = Packing(1, DeviceCopies(torch.device("cpu")))
        with pytest.raises(PeerError, match="not this one"):
            await threads.unpack(packed_frame(1), INT8, check)
        threads.close()

    asyncio.run(test())


def _wait(event: threading.Event) -> None:
    assert event.wait(10)
