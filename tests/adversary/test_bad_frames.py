"""Frames that a neighbour or the coordinator should never send to a stage, as they come off the wire."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ravnest.errors import PeerError
from ravnest.graph.portable import ValueSpec
from ravnest.net.frame_limits import FrameLimits
from ravnest.net.frames.decoding import decode
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.links.frame_check import check_frame

SPECS = {
    "h": ValueSpec("h", torch.float32, ("s0", 4), True),
    "mask": ValueSpec("mask", torch.bool, ("s0", "s0")),
    "n": ValueSpec("n", None),
}
GOOD = Frame(
    FrameKind.FORWARD,
    3,
    generation=5,
    tensors={"h": torch.zeros(2, 4), "mask": torch.ones(2, 2, dtype=torch.bool)},
    scalars={"n": 2},
)


def came(frame: Frame, kind: FrameKind = FrameKind.FORWARD) -> None:
    check_frame(decode(encode(frame)), kind, 5, SPECS)


def test_a_frame_that_fits_is_taken() -> None:
    came(GOOD)
    # A gradient may be missing, where a value was not used.
    came(Frame(FrameKind.BACKWARD, 3, generation=5), FrameKind.BACKWARD)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": FrameKind.BACKWARD}, "a BACKWARD frame came where only FORWARD frames may"),
        ({"generation": 4}, "a frame of generation 4 came, this stage is of 5"),
        ({"generation": 6}, "a frame of generation 6 came, this stage is of 5"),
        ({"tensors": {"h": torch.zeros(2, 4)}}, r"missing \['mask'\]"),
        ({"scalars": {"n": 2, "x" * 250: 1}}, r"foreign \['x{80}'\]"),
        ({"scalars": {"n": 2, "h": 1.0}}, r"twice \['h'\]"),
        ({"tensors": {"mask": GOOD.tensors["mask"]}, "scalars": {"n": 2, "h": 1.0}}, "h .* is a number and should be"),
        ({"tensors": {**GOOD.tensors, "n": torch.zeros(1)}, "scalars": {}}, "the value n .* does not fit"),
        ({"tensors": {**GOOD.tensors, "h": torch.zeros(2, 4).double()}}, "the value h .* has type torch.float64"),
        ({"tensors": {**GOOD.tensors, "h": torch.zeros(2, 5)}}, r"the value h .* and shape \(2, 5\)"),
        ({"tensors": {**GOOD.tensors, "h": torch.zeros(2, 4, 1)}}, r"the value h .* and shape \(2, 4, 1\)"),
        ({"tensors": {**GOOD.tensors, "h": torch.zeros(3, 4)}}, r"the value mask .* and shape \(2, 2\)"),
        ({"tensors": {**GOOD.tensors, "mask": torch.ones(2, 3) > 0}}, r"the value mask .* and shape \(2, 3\)"),
    ],
    ids=[
        *("kind", "old generation", "generation to come", "missing", "foreign", "twice", "number for a tensor"),
        *("tensor for a number", "type", "shape", "dimensions", "batch against batch", "batch against itself"),
    ],
)
def test_a_frame_of_the_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PeerError, match=words):
        came(replace(GOOD, **changes))


def test_a_bool_that_is_neither_true_nor_false() -> None:
    data = bytearray(encode(replace(GOOD, tensors={"mask": torch.ones(64, dtype=torch.bool)})))
    data[-1] = 7
    with pytest.raises(PeerError, match="holds bytes other than 0 and 1"):
        decode(bytes(data))


def test_a_frame_larger_than_frames_may_be() -> None:
    frame = Frame(FrameKind.FORWARD, 1, tensors={"h": torch.zeros(1000)})
    small = FrameLimits(frame_bytes=1024)
    with pytest.raises(PeerError, match="more than 1024 bytes"):
        decode(encode(frame), small)
    with pytest.raises(PeerError, match="use smaller microbatches"):
        encode(frame, small)


def test_every_truncation_of_a_frame_is_refused() -> None:
    data = encode(GOOD)
    for size in range(len(data)):
        with pytest.raises(PeerError, match="cut short"):
            decode(data[:size])
