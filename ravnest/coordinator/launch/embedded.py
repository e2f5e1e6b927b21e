"""Embedded swarm: a coordinator and its providers on one machine, with the same code as a swarm across the world.

The calling thread owns the requester's Python: it loads the job, captures the model and walks the data. A second thread
runs the network's event loop with the coordinator. The providers are processes of their own, started first because
importing torch takes longest. They get the invite through their standard input once the server listens, and end when
that pipe closes.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ravnest.coordinator.launch.choose_display import choose_display
from ravnest.coordinator.launch.interrupts import Interrupts
from ravnest.coordinator.launch.job_loading import load_shown_job
from ravnest.coordinator.launch.network_loop import NetworkLoop
from ravnest.coordinator.launch.provider_processes import ProviderProcesses, Start
from ravnest.coordinator.plan.cluster_count import check_clusters
from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from ravnest.cores import fair_share, usable_cores
from ravnest.errors import RefusedError, TrainingError
from ravnest.monitor.run_directory import check_run
from ravnest.reference import parse_reference
from ravnest.units import counted

if TYPE_CHECKING:
    from ravnest.coordinator.launch.session import TrainResult
    from ravnest.coordinator.swarm.swarm import Swarm
    from ravnest.job import Job
    from ravnest.monitor.display import Display


def train(
    job: "Job",
    *,
    providers: int = 2,
    clusters: int = 1,
    run: str | PathLike[str] | None = None,
    resume: bool = False,
    display: bool = True,
    devices: Sequence[str] = ("auto",),
) -> "TrainResult":
    """Trains the job on `providers` processes of this machine, in this many clusters; RavnestError if the run fails."""
    check_clusters(providers, clusters)
    check_run(None if run is None else Path(run), job_name="job", resume=resume)
    with Interrupts() as interrupts, EmbeddedSwarm(providers, devices) as swarm:
        return swarm.train(job, clusters=clusters, run=run, resume=resume, display=display, interrupts=interrupts)


def train_from_reference(
    reference: str,
    *,
    providers: int,
    clusters: int,
    run: Path | None,
    resume: bool,
    overrides: list[str],
    display: bool,
    devices: Sequence[str] = ("auto",),
) -> int:
    """`ravnest train`: the same for a job file. Returns the exit code: 0 when the run finished, 130 or 143 when it was
    interrupted (SIGINT, SIGTERM)."""
    # Errors that need no torch are reported before any process is started.
    name = parse_reference(reference).title
    check_clusters(providers, clusters)
    check_run(run, job_name=name, resume=resume)
    with Interrupts() as interrupts, EmbeddedSwarm(providers, devices) as swarm:
        shown = choose_display(enabled=True, plain=not display)
        with closing(shown):
            # The providers import torch while this process does.
            phase = f"starting {counted(providers, 'provider')}"
            job = load_shown_job(reference, overrides, interrupts, shown, phase, name)
            result = swarm.train(
                job, clusters=clusters, name=name, run=run, resume=resume, display=shown, interrupts=interrupts
            )
    return 0 if result.summary.status == "finished" else interrupts.exit_code


class EmbeddedSwarm:
    """Providers on this machine that can train one job after another. However the block ends, none outlives it."""

    def __init__(
        self,
        providers: int,
        devices: Sequence[str] = ("auto",),
        slower: Sequence[float] = (1.0,),
        start: Start | None = None,
    ) -> None:
        """Starts the providers, on the `devices` in turn. `slower` gives factors, also in turn: a provider with a
        factor above 1 computes like a machine that is slower by that factor. `start` starts one process (None: the
        command itself)."""
        self._stack = ExitStack()
        self._processes = self._stack.enter_context(ProviderProcesses(providers, devices, slower, start))
        self._loop: NetworkLoop | None = None
        self._swarm: Swarm | None = None

    @property
    def processes(self) -> dict[str, int]:
        """The process id of every provider that is running, by name: provider-0, provider-1 and so on."""
        return self._processes.running

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def train(
        self,
        job: "Job",
        *,
        providers: int | None = None,
        clusters: int = 1,
        name: str = "job",
        run: str | PathLike[str] | None = None,
        resume: bool = False,
        display: "bool | Display" = True,
        interrupts: Interrupts | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> "TrainResult":
        """Trains the job on the first `providers` of the swarm (None: all that are left), in this many clusters.
        Providers without a stage are standbys. RavnestError when the run fails."""
        from ravnest.coordinator.launch.session import RunRequest, run_session

        # A provider that an earlier run lost does not count.
        left = self._processes.count - self._processes.told
        if not left:
            raise TrainingError("all providers of this swarm have ended; start another one")
        count = left if providers is None else min(providers, left)
        check_clusters(count, clusters)
        loop, swarm = self._open()
        shown = choose_display(enabled=display, plain=False) if isinstance(display, bool) else display
        path = None if run is None else Path(run)
        with ExitStack() as stack:
            if interrupts is None:
                interrupts = stack.enter_context(Interrupts())
            interrupts.hurry = self._processes.kill
            stack.callback(shown.close)
            swarm.most = left
            request = RunRequest(job, name, path, resume, self._processes.take_start_time(), timeouts)
            session = stack.enter_context(run_session(swarm, loop, request, shown, interrupts, count))

            def died(name: str, how: str) -> None:
                loop.soon(session.coordinator.lost, name, how)
                # Also when that run is over, so that the next one does not wait for the provider.
                loop.soon(swarm.dismiss, name, RefusedError(f"{name} has ended: {how}"))

            self._processes.on_death(died)
            threads = fair_share(usable_cores(), count, count - 1)
            return session.train(count, clusters, threads)

    def _open(self) -> "tuple[NetworkLoop, Swarm]":
        """The network's loop and the swarm on it. The first call starts them and invites the providers."""
        if self._loop is None or self._swarm is None:
            from ravnest.coordinator.access.admission import Admission
            from ravnest.coordinator.swarm.swarm import Swarm

            self._loop = self._stack.enter_context(NetworkLoop())
            admission = Admission.in_memory()
            self._swarm = Swarm(admission, most=self._processes.count)
            port = self._loop.call(self._swarm.start())
            invite = admission.invite("127.0.0.1", port, uses=self._processes.count, lifetime_seconds=None)
            loop, swarm = self._loop, self._swarm
            self._stack.callback(lambda: loop.call_quietly(swarm.stop("the run is over")))
            self._processes.invite(invite.line)
        return self._loop, self._swarm
