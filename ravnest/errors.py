"""Exceptions of Ravnest: one tree; each message is a sentence that names the thing, the reason and the fix.

RavnestError
├── JobError        the job file or one of the job's fields is wrong
├── CaptureError    the model, loss or metrics cannot become a portable graph
├── GraphError      a portable graph is malformed or asks for something off the allow-list
│   └── LentMemoryError  … or needs more memory than the provider lends
├── PlanError       the model cannot be cut or placed as asked
├── PeerError       another node is unreachable, refused us, or broke the protocol
│   └── RefusedError    … and a retry would end the same way
├── RunError        the run directory, a checkpoint or a port cannot be used
│   └── DiskFullError   … because the disk is full
└── TrainingError   training itself cannot continue (a loss that is not finite, a lost provider)
"""

from typing import Final

SENTENCE_CHARACTERS: Final = 2000
"""Far more than any sentence of ours has: what is longer carries something that was sent."""


class RavnestError(Exception):
    """Base of all errors a user may see; the command line prints only the message and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """`text` as one line that neither steers a terminal nor floods it: parts of it may come from another machine."""
    if len(text) > SENTENCE_CHARACTERS:
        text = f"{text[: SENTENCE_CHARACTERS // 2]} … {text[3 - SENTENCE_CHARACTERS // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


class JobError(RavnestError):
    """The job file or one of the job's fields is wrong."""


class CaptureError(RavnestError):
    """The model, loss or metrics cannot become a portable graph."""


class GraphError(RavnestError):
    """A portable graph is malformed, or asks for something that is not on the allow-list."""


class LentMemoryError(GraphError):
    """A graph would need more memory than the provider lends; the call that would exceed it was not made."""


class PlanError(RavnestError):
    """The model cannot be cut or placed as asked."""


class PeerError(RavnestError):
    """Another node cannot be reached, refused us, or broke the protocol."""


class RefusedError(PeerError):
    """Another node refused us or broke the protocol; a retry would end the same way."""


class RunError(RavnestError):
    """The run directory, a checkpoint or a port cannot be used."""


class DiskFullError(RunError):
    """The disk is full."""


class TrainingError(RavnestError):
    """Training itself cannot continue."""


def error_text(error: BaseException) -> str:
    """The message of one of our own errors; any other error with its type."""
    return str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
