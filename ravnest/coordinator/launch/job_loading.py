"""Loading of a job file, while the display shows that the command is at work."""

from typing import TYPE_CHECKING

from ravnest.coordinator.launch.choose_display import showing
from ravnest.coordinator.launch.interrupts import Interrupts

if TYPE_CHECKING:
    from ravnest.job import Job
    from ravnest.monitor.display import Display


def load_shown_job(
    reference: str, overrides: list[str], interrupts: Interrupts, display: "Display", phase: str, title: str
) -> "Job":
    """The job of a reference, with the overrides of the command line; JobError when it cannot be used."""
    with showing(display, phase, title):
        # Only now: importing torch takes seconds.
        from ravnest.jobfile import load_job
        from ravnest.overrides import apply_overrides

        job = apply_overrides(load_job(reference), overrides)
        interrupts.check()
    return job
