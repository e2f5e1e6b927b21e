"""A stage's artifacts over real sockets: whatever breaks, each byte is fetched once, and only the right ones used."""

import asyncio
import hashlib
import os
import random
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import GraphError, PeerError, RefusedError
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import ArtifactRef
from ravnest.provider.fetch import artifacts as module
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.cache import ArtifactCache, CachedFile, files_to_delete
from ravnest.provider.fetch.progress import FetchProgress
from tests.net.swarm_ends import Coordinator, a_node, run

CONTENT = random.Random(0).randbytes(6_000_007)


class Sink:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed(self, chunk: bytes) -> None:
        self.data += chunk


class Requester(Coordinator):
    """A coordinator that remembers from which byte it was asked for what."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []
        self.sent = 0
        self.stop_after: int | None = None
        self.stopped = asyncio.Event()

    async def fetch(self, node_id: str, artifact: str, offset: int) -> AsyncIterator[bytes]:
        self.asked.append((artifact, offset))
        if artifact not in self.artifacts:
            raise RefusedError(f"there is no artifact {artifact}")
        data = self.artifacts[artifact][offset:]
        for start in range(0, len(data), 1 << 18):
            if self.stop_after is not None and self.sent >= self.stop_after:
                self.stopped.set()
                await asyncio.Event().wait()
            yield data[start : start + (1 << 18)]
            self.sent += 1 << 18


class Line:
    """A line to the requester that breaks after each of these numbers of bytes."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self.port = port
        self.cuts = cuts

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self.cuts.pop(0) if self.cuts else None
        there, further = await asyncio.open_connection("127.0.0.1", self.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, counted: bool) -> None:
            nonlocal left
            while data := await source.read(1 << 16):
                if counted and left is not None:
                    left -= len(data)
                    if left < 0:
                        break
                target.write(data)
                await target.drain()

        tasks = [asyncio.create_task(pump(reader, further, False)), asyncio.create_task(pump(there, writer, True))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (writer, further):
                end.transport.abort()


class Ends:
    """A requester, the lines to it, and what providers on this machine say."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.requester = Requester()
        self.said: list[str] = []
        self._stack = stack

    async def client(self, *cuts: int) -> CoordinatorClient:
        line = Line(self.requester.port, list(cuts))
        server = await asyncio.start_server(line.carry, "127.0.0.1", 0)
        self._stack.callback(server.close)
        keys = a_node(self.requester.admission, "anna").tls_keys()
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = CoordinatorClient(address, keys, "what this test showed")
        self._stack.push_async_callback(client.close)
        return client

    async def get(
        self, cache: ArtifactCache | None, *cuts: int, ref: ArtifactRef | None = None
    ) -> tuple[bytes, FetchProgress]:
        ref = ref or a_ref()
        progress = FetchProgress(ref.size_bytes)
        artifacts = Artifacts(await self.client(*cuts), cache, self.said.append)
        return bytes((await artifacts.get(ref, Sink, progress)).data), progress

    @property
    def offsets(self) -> list[int]:
        return [offset for _, offset in self.requester.asked]


@asynccontextmanager
async def ends(content: bytes = CONTENT) -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        made = Ends(stack)
        made.requester.artifacts = {"weights": content}
        made.requester.port = await made.requester.server.start("127.0.0.1", 0)
        stack.push_async_callback(made.requester.close)
        yield made


def a_ref(content: bytes = CONTENT) -> ArtifactRef:
    return ArtifactRef(id="weights", sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


NAME = a_ref().sha256


@pytest.mark.parametrize("kept", [False, True])
def test_a_transfer_that_is_cut_goes_on_at_the_byte_where_it_stopped(tmp_path: Path, kept: bool) -> None:
    async def test() -> None:
        async with ends() as swarm:
            cache = ArtifactCache(tmp_path) if kept else None
            data, progress = await swarm.get(cache, 2_000_000, 1_500_000, 1_500_000)
            assert data == CONTENT
            assert progress.fetched_bytes == len(CONTENT), "something was fetched twice"
            assert len(swarm.offsets) >= 4 and swarm.offsets == sorted(set(swarm.offsets)) and swarm.offsets[0] == 0
            assert len(swarm.said) >= 3 and "the transfer of weights broke off at" in swarm.said[0]
            assert names(tmp_path) == ([NAME] if kept else [])

    run(test())


def test_a_provider_that_was_ended_goes_on_from_its_partial_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with ends() as swarm:
            swarm.requester.stop_after = 3_000_000
            first = asyncio.create_task(swarm.get(ArtifactCache(tmp_path)))
            await swarm.requester.stopped.wait()
            partial = tmp_path / f"{NAME}.partial"
            while partial.stat().st_size < 2_000_000:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            had = partial.stat().st_size
            assert partial.read_bytes() == CONTENT[:had]
            swarm.requester.stop_after = None
            data, progress = await swarm.get(ArtifactCache(tmp_path))
            assert data == CONTENT and swarm.offsets == [0, had]
            assert (progress.kept_bytes, progress.fetched_bytes) == (had, len(CONTENT) - had)
            assert (tmp_path / NAME).read_bytes() == CONTENT and names(tmp_path) == [NAME]
            assert (tmp_path / NAME).stat().st_mode & 0o077 == 0

    run(test())


def test_an_artifact_is_fetched_once_for_all_providers(tmp_path: Path) -> None:
    async def test() -> None:
        async with ends() as swarm:
            await swarm.get(ArtifactCache(tmp_path))
        async with ends() as elsewhere:
            elsewhere.requester.artifacts = {}
            data, progress = await elsewhere.get(ArtifactCache(tmp_path))
            assert data == CONTENT and elsewhere.offsets == [] and elsewhere.said == []
            assert (progress.kept_bytes, progress.fetched_bytes) == (len(CONTENT), 0)
            assert progress.last_line() == "the stage was here already, 6.0 MB"

    run(test())


@pytest.mark.parametrize("name", [NAME, f"{NAME}.partial"], ids=["whole", "partial"])
@pytest.mark.parametrize(
    "damaged",
    [CONTENT[:100] + bytes(9) + CONTENT[109:], CONTENT + b"more", b"something else", bytes(len(CONTENT) // 2)],
    ids=["changed", "longer", "short", "zeros"],
)
def test_a_damaged_file_is_noticed_and_fetched_again(tmp_path: Path, name: str, damaged: bytes) -> None:
    async def test() -> None:
        async with ends() as swarm:
            (tmp_path / name).write_bytes(damaged)
            data, progress = await swarm.get(ArtifactCache(tmp_path))
            assert data == CONTENT and swarm.offsets[-1] == 0
            assert swarm.said == ["the copy of weights on this disk is damaged: fetching it again"]
            assert (tmp_path / NAME).read_bytes() == CONTENT and names(tmp_path) == [NAME]
            assert (progress.kept_bytes, progress.fetched_bytes) == (0, len(CONTENT))

    run(test())


def test_a_damaged_file_that_makes_no_sense_is_no_reason_to_blame_the_coordinator(tmp_path: Path) -> None:
    class Picky(Sink):
        def feed(self, chunk: bytes) -> None:
            if not self.data and not chunk.startswith(CONTENT[:4]):
                raise GraphError("this is no header")
            super().feed(chunk)

    async def test() -> None:
        async with ends() as swarm:
            (tmp_path / NAME).write_bytes(bytes(1000))
            artifacts = Artifacts(await swarm.client(), ArtifactCache(tmp_path), swarm.said.append)
            assert (await artifacts.get(a_ref(), Picky, FetchProgress(1))).data == CONTENT
            swarm.requester.artifacts = {"weights": bytes(1000)}
            with pytest.raises(GraphError, match="this is no header"):
                await artifacts.get(a_ref(bytes(1000)), Picky, FetchProgress(1))
            assert names(tmp_path) == [NAME]

    run(test())


def test_two_providers_of_one_machine_fetch_it_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with ends() as swarm:
            swarm.requester.stop_after = 1_000_000
            first = asyncio.create_task(swarm.get(ArtifactCache(tmp_path)))
            await swarm.requester.stopped.wait()
            second = asyncio.create_task(swarm.get(ArtifactCache(tmp_path)))
            while not swarm.said:
                await asyncio.sleep(0)
            assert swarm.said == ["waiting for weights: another provider on this machine is fetching it"]
            # The first is ended in the middle: the second takes over where it was.
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            swarm.requester.stop_after = None
            data, progress = await second
            assert data == CONTENT and progress.received_bytes == len(CONTENT)
            assert swarm.offsets == [0, progress.kept_bytes]

            (tmp_path / NAME).unlink()
            both = await asyncio.gather(*(swarm.get(ArtifactCache(tmp_path)) for _ in range(3)))
            assert [data for data, _ in both] == [CONTENT] * 3
            assert sorted(progress.fetched_bytes for _, progress in both) == [0, 0, len(CONTENT)]
            assert len(swarm.offsets) == 3

    run(test())


def test_the_longest_unused_is_thrown_out_for_what_is_new(tmp_path: Path) -> None:
    contents = [bytes([number]) * 1_000_000 for number in range(4)]
    files = [tmp_path / a_ref(content).sha256 for content in contents]

    async def test() -> None:
        async with ends() as swarm:
            cache = ArtifactCache(tmp_path, limit_bytes=3_000_000)
            (tmp_path / "notes.txt").write_bytes(bytes(5_000_000))
            for number in (0, 1, 2, 0, 3):
                swarm.requester.artifacts = {"weights": contents[number]}
                await swarm.get(cache, ref=a_ref(contents[number]))
                os.utime(files[number], (number, 10 + len(swarm.requester.asked)))
                if number == 2:
                    os.utime(files[0], (1000, 1000))
            assert [file.exists() for file in files] == [True, False, True, True]
            assert (tmp_path / "notes.txt").exists(), "a file of another program was deleted"
            assert len(swarm.requester.asked) == 4

            data, _ = await swarm.get(ArtifactCache(tmp_path, limit_bytes=900_000), ref=a_ref(contents[3]))
            assert data == contents[3], "what is there is used, however little may be kept"
            swarm.requester.artifacts = {"weights": contents[1]}
            data, _ = await swarm.get(ArtifactCache(tmp_path, limit_bytes=900_000), ref=a_ref(contents[1]))
            assert data == contents[1] and not files[1].exists()
            assert swarm.said == ["weights has 1.0 MB, more than the cache may hold: not kept"]

    run(test())


@given(sizes=st.lists(st.integers(0, 50), max_size=8), size=st.integers(0, 60), limit=st.integers(0, 120))
def test_what_is_thrown_out_is_no_more_than_is_needed(sizes: list[int], size: int, limit: int) -> None:
    files = [CachedFile(Path(str(number)), held, -number) for number, held in enumerate(sizes)]
    going, reason = files_to_delete(files, size, limit)
    if going is None:
        assert size > limit and "more than" in reason
        return
    assert sum(sizes) - sum(file.size_bytes for file in going) + size <= limit
    assert not going or sum(sizes) - sum(file.size_bytes for file in going[:-1]) + size > limit
    assert going == sorted(files, key=lambda file: file.used_at)[: len(going)]


@contextmanager
def a_disk_that_takes(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_the_rest_goes_on_in_memory(tmp_path: Path) -> None:
    async def test() -> None:
        async with ends() as swarm:
            with a_disk_that_takes(2_500_000):
                data, progress = await swarm.get(ArtifactCache(tmp_path), 4_000_000)
            assert data == CONTENT and progress.fetched_bytes == len(CONTENT)
            # Whether the disk or the cut, which comes later but is noticed at once, is told of first is chance.
            assert "cannot keep the stage on this disk (File too large): going on in memory" in swarm.said
            assert names(tmp_path) == []

    run(test())


def test_a_cache_that_cannot_be_had_is_done_without(tmp_path: Path) -> None:
    async def test() -> None:
        async with ends() as swarm:
            (tmp_path / "file").touch()
            data, _ = await swarm.get(ArtifactCache(tmp_path / "file"))
            assert data == CONTENT
            assert swarm.said == ["cannot keep the stage on this disk (File exists): going on in memory"]

    run(test())


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), "arrived damaged"),
        (CONTENT + bytes(1000), "is larger than the 6000007 bytes announced"),
        (CONTENT[:-1000], "ended after 5999007 of 6000007 bytes"),
    ],
    ids=["other", "more", "less"],
)
def test_other_bytes_than_announced_are_refused_and_not_kept(
    tmp_path: Path, kept: bool, sent: bytes, words: str
) -> None:
    async def test() -> None:
        async with ends(sent) as swarm:
            with pytest.raises(RefusedError, match=words):
                await swarm.get(ArtifactCache(tmp_path) if kept else None)
            assert names(tmp_path) == [] and swarm.offsets == [0]

    run(test())


def test_a_hash_is_no_path(tmp_path: Path) -> None:
    async def test() -> None:
        async with ends() as swarm:
            for sha256 in ("", "../../secret", "0" * 63, "A" * 64):
                ref = ArtifactRef(id="weights", sha256=sha256, size_bytes=9)
                with pytest.raises(RefusedError, match="has no sha256 to check it by"):
                    await swarm.get(ArtifactCache(tmp_path), ref=ref)
            assert swarm.offsets == []

    run(test())


def test_a_refusal_is_taken_for_an_answer_and_silence_only_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.3)

    async def test() -> None:
        async with ends() as swarm:
            swarm.requester.artifacts = {}
            with pytest.raises(RefusedError, match="there is no artifact weights"):
                await swarm.get(None)
            assert swarm.offsets == [0]
            with pytest.raises(PeerError, match="weights stopped at byte 0 of 6000007: "):
                await swarm.get(None, *[100] * 50)

    run(test())


def test_the_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = ArtifactCache.of_user(None)
    assert cache is not None
    kept = cache.open(NAME, 10)
    assert kept is not None
    kept.append(b"0123456789")
    kept.finish()
    kept.close()
    folder = tmp_path / "ravnest/artifacts"
    assert names(folder) == [NAME] and folder.stat().st_mode & 0o077 == 0
    assert ArtifactCache.of_user(0) is None
