"""The exceptions of Ravnest: one tree, each message a sentence that names the thing, the reason and the fix.

RavnestError
├── JobError        the job file or one of the job's fields is wrong
├── CaptureError    the model, loss or metrics cannot become a portable graph
├── GraphError      a portable graph is malformed or asks for something off the allow-list
├── PlanError       the model cannot be cut or placed as asked
├── PeerError       another node is unreachable, refused us, or broke the protocol
│   └── RefusedError    … and would do the same if it were tried again
├── RunError        the run directory, a checkpoint or a port cannot be used
└── TrainingError   training itself cannot go on (a loss that is not finite, a lost provider)
"""


class RavnestError(Exception):
    """Base of all errors a user may see; the command line prints the message alone and exits with `exit_code`."""

    exit_code = 2


class JobError(RavnestError):
    """The job file or one of the job's fields is wrong."""


class CaptureError(RavnestError):
    """The model, loss or metrics cannot become a portable graph."""


class GraphError(RavnestError):
    """A portable graph is malformed, or asks for something that is not on the allow-list."""


class PlanError(RavnestError):
    """The model cannot be cut or placed as asked."""


class PeerError(RavnestError):
    """Another node cannot be reached, refused us, or broke the protocol."""


class RefusedError(PeerError):
    """Another node refused us or broke the protocol: to try again would end the same way."""


class RunError(RavnestError):
    """The run directory, a checkpoint or a port cannot be used."""


class TrainingError(RavnestError):
    """Training itself cannot go on."""
