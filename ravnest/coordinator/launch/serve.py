"""The coordinator of a real swarm: listens for providers elsewhere, and trains the job when enough have joined.

The same coordinator and the same providers as in the embedded swarm; here the providers come by themselves, with an
invite. Who they are is kept in the run directory, so that a coordinator that is started again knows its swarm.
"""

import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ravnest.coordinator.launch.display import choose_display, showing
from ravnest.coordinator.launch.interrupts import Interrupts
from ravnest.coordinator.launch.network_loop import NetworkLoop
from ravnest.coordinator.plan.cluster_count import check_clusters
from ravnest.errors import RunError
from ravnest.monitor.run_directory import RunDirectory, check_run
from ravnest.reference import parse_reference

if TYPE_CHECKING:
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
) -> int:
    """`ravnest serve`. The exit code: 0 when the run finished, 130 or 143 when it was interrupted.

    `listen`, `advertise`, `providers` and `clusters` are None for what they were when the run was served before. If
    nobody has ever said how many clusters, there are as many as are fastest.
    """
    name = parse_reference(reference).title
    check_clusters(providers, clusters)
    check_run(run, job_name=name, resume=resume)
    with Interrupts() as interrupts, ExitStack() as stack:
        folder = stack.enter_context(RunDirectory.open(run, job_name=name, resume=resume))
        shown = stack.enter_context(closing(choose_display(enabled=True, plain=not display)))
        started = time.perf_counter()
        swarm = stack.enter_context(ServedSwarm(folder, listen, advertise, providers, clusters, shown))
        # Before anything is shown: a live display takes what is printed for lines of its own.
        print(f"invite: ravnest join {swarm.invite.line}", flush=True)
        with showing(shown, "loading the job", name):
            from ravnest.jobfile import load_job
            from ravnest.overrides import apply_overrides

            job = apply_overrides(load_job(reference), overrides)
            interrupts.check()
        result = swarm.train(job, name, resume, interrupts, started)
    return 0 if result.summary.status == "finished" else interrupts.exit_code


class ServedSwarm:
    """A coordinator that listens, with one new invite. At the end of the block its providers are told to stop."""

    def __init__(
        self,
        run: RunDirectory,
        listen: HostPort | None,
        advertise: HostPort | None,
        providers: int | None,
        clusters: int | None,
        display: "Display",
    ) -> None:
        """Listens; RunError when the address cannot be had. `display` is told who is known, who comes and who goes."""
        from ravnest.coordinator.access.admission import Admission
        from ravnest.coordinator.access.invites import uses_for
        from ravnest.coordinator.access.swarm_store import Listening, SwarmState, known_from_before
        from ravnest.coordinator.swarm.membership_log import announce, remember, watch_for_kicks
        from ravnest.coordinator.swarm.swarm import Swarm

        self._run = run
        self._display = display
        self._ended = "the coordinator has ended"
        self._stack = ExitStack()
        with ExitStack() as stack:
            admission = Admission.open(run.path)
            stack.callback(admission.close)
            state = SwarmState(run.store_path)
            stack.callback(state.close)
            state.nobody_connected()
            before = state.listening()
            if listen is None:
                if before is None:
                    raise RunError(f"{run.path} was never served; say where to listen with --listen HOST:PORT")
                listen = before.host, before.port
            self._providers = providers or len(state.plan()) or None
            self._clusters = clusters or state.clusters()
            check_clusters(self._providers, self._clusters)
            if clusters is not None:
                state.asked_for(clusters)
            self._swarm = Swarm(admission)
            self._swarm.state = state
            self._loop = stack.enter_context(NetworkLoop())
            port = self._loop.call(self._swarm.start(*listen))
            stack.callback(lambda: self._loop.call_quietly(self._swarm.stop(self._ended)))
            listening = Listening(listen[0], port, advertise is not None)
            if before is not None and before.advertised and before.port == port and advertise is None:
                # What the requester said of its router holds on: so do the invites and addresses that others have.
                advertise, listening = admission.tokens.advertised(), before
            host, advertised_port = _advertised(listen[0], port, advertise, display)
            if before is not None and (host, advertised_port) != (was := admission.tokens.advertised()):
                display.message(_moved(was, (host, advertised_port)))
            admission.tokens.advertise(host, advertised_port)
            state.listens(listening)
            self.invite: SwarmInvite = admission.invite(
                host, advertised_port, uses_for(self._providers), note="made by ravnest serve"
            )
            if known := known_from_before(state.members()):
                display.message(known)
            stack.enter_context(self._loop.running(watch_for_kicks(self._swarm)))
            stack.enter_context(self._loop.running(announce(self._swarm, self._providers, display.message)))
            stack.callback(lambda: _all_gone(state))
            stack.enter_context(self._loop.running(remember(self._swarm, state)))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._ended = "the run has failed" if isinstance(error, Exception) else "the coordinator was stopped"
        self._stack.close()

    def train(
        self,
        job: "Job",
        name: str,
        resume: bool,
        interrupts: Interrupts,
        started: float,
    ) -> "TrainResult":
        """Trains the job on the first providers that have joined; a RavnestError when it cannot go on."""
        from ravnest.coordinator.launch.session import Session

        loop, state = self._loop, self._swarm.state
        position = None if state is None else state.position()
        if resume and position is not None:
            self._display.message(
                f"it had come to {position.updates} updates before; what no checkpoint has is trained again"
            )
        with ExitStack() as stack:
            session = Session(self._swarm, job, name, self._run, resume, self._display, interrupts, started)
            stack.callback(session.close)
            loop.call(session.coordinator.start())
            stack.callback(lambda: loop.call_quietly(session.coordinator.close()))
            result = session.train(self._providers, self._clusters, None, loop.call)
        self._ended = f"the run has {result.summary.status}"
        return result


def _all_gone(state: "SwarmState") -> None:
    # Whatever ended the run is the better reason than a disk that is full now.
    with suppress(RunError):
        state.connected([], time.time())


def _moved(was: HostPort, now: HostPort) -> str:
    from ravnest.net.address import join_address

    return (
        f"warning: this coordinator was at {join_address(*was)} and is at {join_address(*now)} now: invites and "
        "providers of before do not find it; give --listen and --advertise as they were, or send everybody the new "
        "invite"
    )


def _advertised(listen_host: str, port: int, given: HostPort | None, display: "Display") -> HostPort:
    """The address for the invite; the display is told where it does not reach far."""
    from ravnest.net.address import is_wildcard, join_address, outward_address, reach

    if given is not None:
        return given[0], given[1] or port
    host = outward_address() if is_wildcard(listen_host) else listen_host
    how_far = reach(host)
    if how_far != "internet":
        where = "of this machine alone" if how_far == "machine" else "of a private network"
        display.message(
            f"warning: {host} is an address {where}: nobody outside of it can join with this invite; to invite others, "
            f"let your router forward port {port} to this machine and give --advertise {join_address('PUBLIC', port)}"
        )
    return host, port
