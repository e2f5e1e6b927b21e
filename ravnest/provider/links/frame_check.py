"""Check of a frame against a stage's signature: its kind, generation, names, types and shapes."""

from collections.abc import Mapping

from ravnest.errors import PeerError
from ravnest.graph.portable import ValueSpec
from ravnest.net.frames.frames import Frame, FrameKind


def check_frame(frame: Frame, kind: FrameKind, generation: int, specs: Mapping[str, ValueSpec]) -> None:
    """PeerError unless the frame is of this kind and generation and contains exactly these values.

    A BACKWARD frame may lack some: a value that was not used has no gradient. Values need not be finite here:
    activations may be infinite in a correct model, and gradients are checked before they are applied.
    """
    if frame.kind is not kind:
        raise PeerError(f"a {frame.kind.name} frame came where only {kind.name} frames may")
    if frame.generation != generation:
        raise PeerError(f"a frame of generation {frame.generation} came, this stage is of {generation}")
    if frame.coded:
        raise PeerError(f"a {kind.name} frame came in a codec where none is agreed on")
    given = frame.tensors.keys() | frame.scalars.keys()
    missing = set() if kind is FrameKind.BACKWARD else specs.keys() - given
    foreign = given - specs.keys()
    twice = frame.tensors.keys() & frame.scalars.keys()
    if missing or foreign or twice:
        raise PeerError(
            f"a {kind.name} frame has the wrong values "
            f"(missing {_listed(missing)}, foreign {_listed(foreign)}, twice {_listed(twice)})"
        )
    for name in frame.scalars:
        if specs[name].dtype is not None:
            raise PeerError(f"the value {name} of a {kind.name} frame is a number and should be a tensor")
    free: dict[str, int] = {}
    for name, tensor in frame.tensors.items():
        spec = specs[name]
        fits = len(spec.shape) == tensor.dim() and all(
            # The same text means the same size, in all values of the frame.
            have == (free.setdefault(want, have) if isinstance(want, str) else want)
            for want, have in zip(spec.shape, tensor.shape, strict=True)
        )
        if tensor.dtype != spec.dtype or not fits:
            raise PeerError(
                f"the value {name} of a {kind.name} frame has type {tensor.dtype} and shape {tuple(tensor.shape)}, "
                f"which does not fit the stage's {spec.dtype} and {spec.shape}"
            )


def _listed(names: set[str]) -> list[str]:
    return [name[:80] for name in sorted(names)[:8]]
