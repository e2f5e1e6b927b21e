"""Served swarm: a coordinator that listens for providers elsewhere, and trains the job when enough have joined.

The coordinator and the providers are the same as in the embedded swarm, but the providers join by themselves, with an
invite. The run directory keeps their identities, so that a restarted coordinator knows its swarm.
"""

import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ravnest.coordinator.launch.choose_display import choose_display
from ravnest.coordinator.launch.interrupts import Interrupts
from ravnest.coordinator.launch.job_loading import load_shown_job
from ravnest.coordinator.launch.network_loop import NetworkLoop
from ravnest.coordinator.plan.cluster_count import check_clusters
from ravnest.errors import RunError
from ravnest.monitor.run_directory import RunDirectory, check_run
from ravnest.reference import parse_reference

if TYPE_CHECKING:
    from ravnest.coordinator.access.admission import Admission
    from ravnest.coordinator.access.swarm_store import SwarmState
    from ravnest.coordinator.launch.session import TrainResult
    from ravnest.job import Job
    from ravnest.monitor.display import Display
    from ravnest.net.identity.swarm_invite import SwarmInvite

HostPort = tuple[str, int]


def serve_from_reference(
    reference: str,
    *,
    listen: HostPort | None,
    advertise: HostPort | None,
    providers: int | None,
    clusters: int | None = None,
    run: Path | None,
    resume: bool,
    overrides: list[str],
    display: bool,
    upload_bytes_per_second: float | None = None,
    download_bytes_per_second: float | None = None,
) -> int:
    """`ravnest serve`. Returns the exit code: 0 when the run finished, 130 or 143 when it was interrupted.

    `listen`, `advertise`, `providers` and `clusters` are None for what they were when the run was served before. If no
    number of clusters was ever given, the planner chooses the fastest. The rates are those of this machine's line; None
    for the best that providers measure.
    """
    name = parse_reference(reference).title
    check_clusters(providers, clusters)
    check_run(run, job_name=name, resume=resume)
    with Interrupts() as interrupts, ExitStack() as stack:
        folder = stack.enter_context(RunDirectory.open(run, job_name=name, resume=resume))
        shown = stack.enter_context(closing(choose_display(enabled=True, plain=not display)))
        started = time.perf_counter()
        swarm = stack.enter_context(ServedSwarm(folder, listen, advertise, providers, clusters, shown))
        # Printed before the live display starts, which would overwrite the line.
        print(f"invite: ravnest join {swarm.invite.line}", flush=True)
        job = load_shown_job(reference, overrides, interrupts, shown, "loading the job", name)
        line = upload_bytes_per_second, download_bytes_per_second
        result = swarm.train(job, name, resume, interrupts, started, line)
    return 0 if result.summary.status == "finished" else interrupts.exit_code


class ServedSwarm:
    """A coordinator that listens, with a new invite. At the end of the block, it tells its providers to stop."""

    def __init__(
        self,
        run: RunDirectory,
        listen: HostPort | None,
        advertise: HostPort | None,
        providers: int | None,
        clusters: int | None,
        display: "Display",
    ) -> None:
        """Listens; RunError when the address is not available.

        An argument that is None is as it was when the run was served before. The display shows which providers are
        known, join and leave.
        """
        from ravnest.coordinator.access.admission import Admission
        from ravnest.coordinator.access.invites import uses_for
        from ravnest.coordinator.access.swarm_store import SwarmState, known_from_before
        from ravnest.coordinator.swarm.membership_log import announce, remember, watch_for_kicks
        from ravnest.coordinator.swarm.swarm import Swarm

        self._run = run
        self._display = display
        self._stop_reason = "the coordinator has ended"
        self._stack = ExitStack()
        with ExitStack() as stack:
            admission = Admission.open(run.path)
            stack.callback(admission.close)
            self.state = state = SwarmState(run.store_path)
            stack.callback(state.close)
            state.clear_connected()
            self.providers = providers or len(state.plan()) or None
            """Providers that must have joined before training begins; None for as many as the model needs."""
            self.clusters = clusters or state.clusters()
            """Clusters that they form; None for the fastest number."""
            check_clusters(self.providers, self.clusters)
            if clusters is not None:
                state.asked_for(clusters)
            self._swarm = Swarm(admission)
            self._swarm.state = state
            self._swarm.waits_for_all = providers is not None
            self._swarm.members.restore_presence(state.attendances())
            self._loop = stack.enter_context(NetworkLoop())
            host, port = self._listen(admission, listen, advertise, stack)
            self.invite: SwarmInvite = admission.invite(
                host, port, uses_for(self.providers), note="made by ravnest serve"
            )
            if known := known_from_before(state.members()):
                display.message(known)
            stack.enter_context(self._loop.running(watch_for_kicks(self._swarm)))
            stack.enter_context(self._loop.running(announce(self._swarm, self.providers, display.message)))
            stack.callback(lambda: _note_all_gone(state))
            stack.enter_context(self._loop.running(remember(self._swarm, state)))
            self._stack = stack.pop_all()

    def _listen(
        self, admission: "Admission", listen: HostPort | None, advertise: HostPort | None, stack: ExitStack
    ) -> HostPort:
        """Starts the swarm's server; the address at which providers reach it."""
        from ravnest.coordinator.access.swarm_store import Listening

        before = self.state.listening()
        if listen is None:
            if before is None:
                raise RunError(f"{self._run.path} was never served; say where to listen with --listen HOST:PORT")
            listen = before.host, before.port
        port = self._loop.call(self._swarm.start(*listen))
        stack.callback(lambda: self._loop.call_quietly(self._swarm.stop(self._stop_reason)))
        listening = Listening(listen[0], port, advertise is not None)
        if before is not None and before.advertised and before.port == port and advertise is None:
            # The router still forwards this port, so the invites and addresses that providers have stay valid.
            advertise, listening = admission.tokens.advertised(), before
        address = _advertised(listen[0], port, advertise, self._display)
        if before is not None and address != (was := admission.tokens.advertised()):
            self._display.message(_moved(was, address))
        admission.tokens.advertise(*address)
        self.state.listens(listening)
        return address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._stop_reason = "the run has failed" if isinstance(error, Exception) else "the coordinator was stopped"
        self._stack.close()

    def train(
        self,
        job: "Job",
        name: str,
        resume: bool,
        interrupts: Interrupts,
        started: float,
        line: tuple[float | None, float | None] = (None, None),
    ) -> "TrainResult":
        """Trains the job on the first providers that have joined; RavnestError when the run fails.

        `line` is the upload and download of this machine in bytes per second, where they were given.
        """
        from ravnest.coordinator.launch.session import RunRequest, run_session
        from ravnest.coordinator.plan.provider_profiles import StatedLine

        state = self.state
        position = None if state is None else state.position()
        if resume and position is not None:
            self._display.message(
                f"it had come to {position.updates} updates before; what neither a checkpoint nor the providers' disks "
                "have is trained again"
            )
        request = RunRequest(job, name, self._run, resume, started, line=StatedLine(*line))
        with run_session(self._swarm, self._loop, request, self._display, interrupts) as session:
            result = session.train(self.providers, self.clusters, None)
        self._stop_reason = f"the run has {result.summary.status}"
        return result


def _note_all_gone(state: "SwarmState") -> None:
    # The reason that ended the run is more useful than a disk that is full now.
    with suppress(RunError):
        state.connected([], time.time())


def _moved(was: HostPort, now: HostPort) -> str:
    from ravnest.net.address import join_address

    return (
        f"warning: this coordinator was at {join_address(*was)} and is at {join_address(*now)} now: earlier invites "
        "and providers do not find it; give --listen and --advertise as before, or send the new invite to all providers"
    )


def _advertised(listen_host: str, port: int, given: HostPort | None, display: "Display") -> HostPort:
    """The address for the invite. The display shows a warning when it is not reachable from the internet."""
    from ravnest.net.address import is_wildcard, join_address, outward_address, reach

    if given is not None:
        return given[0], given[1] or port
    host = outward_address() if is_wildcard(listen_host) else listen_host
    how_far = reach(host)
    if how_far != "internet":
        where = "of this machine alone" if how_far == "machine" else "of a private network"
        display.message(
            f"warning: {host} is an address {where}: providers elsewhere cannot join with this invite; to invite them, "
            f"let your router forward port {port} to this machine and give --advertise {join_address('PUBLIC', port)}"
        )
    return host, port
