"""Files of replica parts on this provider's disk: the states of stages after one microbatch, in the format of
checkpoints.

In a folder, `KEY@REPLICA@SHA256` is a complete part, and a name that begins with a dot is a part that is being written.
Without a folder the files have no names, so nothing is left of them when the process ends for any reason. The reader
hashes the bytes, so a damaged file is noticed.

RunError when the disk fails, is nearly full, or its limit is reached; the incomplete part is deleted then. PeerError
when a key is invalid or a part is damaged.
"""

import contextlib
import hashlib
import os
import re
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from torch import Tensor

from ravnest.engine.weights.frozen_state import FrozenState
from ravnest.errors import GraphError, PeerError, RunError
from ravnest.graph.weights import WeightsReader, stream_size_bytes, stream_tensors
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.private_files import make_private_folder
from ravnest.net.v1.control_pb2 import HeldPart
from ravnest.provider.machine.disk_limit import default_limit_bytes
from ravnest.state.reader import PartReader

KEPT: Final = 2
"""Number of parts of each stage. The newest one may not be complete at other providers yet. The part that `forget` has
spared stays in addition."""

WEEK_SECONDS: Final = 7 * 24 * 3600.0
"""Maximum age of a part when the provider starts: an older one belongs to a run that has ended."""

MAX_PARTS: Final = 200
"""Maximum number of parts in total, because each is an open file."""

SPARE_BYTES: Final = 64 << 20
"""Disk space that is left free for other programs."""

TOLD_BYTES: Final = 2 << 10
"""Size of the list of parts in a join request, the newest first. The whole request may have twice this size."""

_START_BYTES: Final = 8
"""First bytes of a hash that tell the forms of a part apart, in a join request."""
_KEY: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,79}")
_NAME: Final = re.compile(rf"({_KEY.pattern})@([0-9]{{1,20}})@([0-9a-f]{{64}})")
_PIECE_BYTES: Final = 1 << 20


def check_key(key: str) -> str:
    """The same key; PeerError if it is invalid, before it is used in a path."""
    if _KEY.fullmatch(key) is None:
        raise PeerError(f"{key[:100]!r} is not the key of a stage; those have letters, digits, dots and dashes")
    return key


class ReplicaPart:
    """A part on the disk. It can be read while this object exists, even after its name is gone."""

    def __init__(self, key: str, replica: int, sha256: str, descriptor: int, path: Path | None) -> None:
        self.key = key
        self.replica = replica
        self.sha256 = sha256
        self.size_bytes = os.fstat(descriptor).st_size
        self.path = path
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __str__(self) -> str:
        return f"the part of {self.key} of replica {self.replica}"

    def chunks(self, chunk_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """All its bytes; PeerError at the end if they have changed, or if they cannot be read."""
        digest, offset = hashlib.sha256(), 0
        try:
            while data := os.pread(self._descriptor, chunk_bytes, offset):
                digest.update(data)
                offset += len(data)
                yield data
        except OSError as error:
            raise PeerError(f"{self} cannot be read here: {error.strerror or error}") from None
        if digest.hexdigest() != self.sha256:
            raise PeerError(f"{self} is damaged on the disk here; use another replica")

    def reader(self) -> PartReader:
        """A reader of its pieces, which are not hashed; PeerError when it is no part file."""
        return PartReader(self._read_at, self.size_bytes)

    def read(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Its tensors and metadata; PeerError when it is damaged."""
        try:
            reader = WeightsReader(self.size_bytes)
            for data in self.chunks():
                reader.feed(data)
            return reader.finish()
        except GraphError as error:
            raise PeerError(f"{self} cannot be used: {error}") from None

    def _read_at(self, offset: int, size_bytes: int) -> bytes:
        try:
            return os.pread(self._descriptor, size_bytes, offset)
        except OSError as error:
            raise PeerError(f"{self} cannot be read here: {error.strerror or error}") from None


class PartFiles:
    """The parts of one provider. Any thread may call the methods, which wait for the disk."""

    def __init__(self, folder: Path | None, limit_bytes: int | None = None) -> None:
        """Loads the parts in `folder`, which belongs to this provider alone; None: files without names. RunError when
        the folder cannot be used. `limit_bytes` limits the size of all parts; None: DEFAULT_LIMIT_BYTES, or less on a
        disk that is nearly full."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._coming: dict[PartWriter, int] = {}
        self._parts: dict[str, dict[int, ReplicaPart]] = {}
        self._unlisted: weakref.WeakSet[ReplicaPart] = weakref.WeakSet()
        self._spared: dict[str, frozenset[int]] = {}
        """By stage, the parts to which the limit KEPT does not apply."""
        self._lock = threading.Lock()
        if folder is not None:
            make_private_folder(folder)
            self._take_up(folder)

    @classmethod
    def of_node(cls, node: NodeIdentity, limit_bytes: int | None, say: Callable[[str], None]) -> Self:
        """The files of a provider: in the folder of its identity if there is one, so that a later process finds them.

        With a limit of 0 the files have no names, and end with the process.
        """
        if node.folder is not None and limit_bytes != 0:
            try:
                return cls(node.folder / "parts", limit_bytes)
            except RunError as error:
                say(f"{error}: parts of replicas will not outlive this process")
        return cls(None)

    def write(self, key: str, replica: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> ReplicaPart:
        """Store a stage's state as a part."""
        writer = self.record(key, replica, tensors, metadata)
        try:
            return writer.finish()
        finally:
            writer.discard()

    def record(
        self, key: str, replica: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> "PartWriter":
        """Write a stage's state to the disk, without a copy in memory and without hashing it, which `finish` does. The
        tensors may change afterwards."""
        return self._record(key, replica, stream_size_bytes(tensors, metadata), stream_tensors(tensors, metadata))

    def record_frozen(self, key: str, replica: int, state: FrozenState) -> "PartWriter":
        """The same for a state that is frozen; it is over then."""
        try:
            return self._record(key, replica, state.size_bytes, state.chunks())
        finally:
            state.release()

    def _record(self, key: str, replica: int, size_bytes: int, chunks: Iterable[bytes]) -> "PartWriter":
        writer, written_bytes = self.begin(key, replica, size_bytes), 0
        try:
            for data in chunks:
                writer.feed_unhashed(data)
                written_bytes += len(data)
            if written_bytes != size_bytes:
                raise RunError(f"the state of {key} gave {written_bytes:,} of its {size_bytes:,} bytes; it is not kept")
        except BaseException:
            writer.discard()
            raise
        return writer

    def begin(self, key: str, replica: int, size_bytes: int, *, listed: bool = True) -> "PartWriter":
        """A writer for a part, which counts once it is complete. One that is not listed has no name, is not found, and
        takes its space for as long as an object refers to it."""
        check_key(key)
        if not 0 < replica < 1 << 63:
            raise PeerError(f"{replica} is not the number of a replica")
        where = self._folder or Path(tempfile.gettempdir())
        try:
            self._check_room(where, size_bytes)
            temporary = where / f".{key}.{secrets.token_hex(8)}"
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            is_named = listed and self._folder is not None
            if not is_named:
                temporary.unlink()
        except OSError as error:
            raise _refused(where, error) from None
        writer = PartWriter(self, key, replica, descriptor, temporary if is_named else None, is_listed=listed)
        with self._lock:
            self._coming[writer] = size_bytes
        return writer

    def find(self, key: str, replica: int) -> ReplicaPart:
        """This part; PeerError if there is none."""
        with self._lock:
            part = self._parts.get(key, {}).get(replica)
        if part is None:
            raise PeerError(f"there is no part of {key[:100]!r} of replica {replica} on this disk")
        return part

    def held(self) -> list[HeldPart]:
        """The parts here, for a join request."""
        with self._lock:
            parts = [part for of_key in self._parts.values() for part in of_key.values()]
        told, size = [], 0
        for part in sorted(parts, key=lambda part: (-part.replica, part.key)):
            start = bytes.fromhex(part.sha256)[:_START_BYTES]
            held = HeldPart(key=part.key, replica=part.replica, sha256_start=start)
            size += held.ByteSize() + 4
            if size > TOLD_BYTES:
                break
            told.append(held)
        return told

    def forget(
        self, keep: Collection[str], before: int, of: Collection[str] = (), pinned: Collection[int] = ()
    ) -> None:
        """Delete all parts except those of the stages in `keep` from the number `before` on; or, with `of`, only the
        older parts of those stages. The `pinned` numbers stay: the coordinator is collecting these parts.

        The oldest other part that is left of a stage is spared from the limit KEPT as well, because newer ones may not
        be complete at all stages.
        """
        keep = of or keep
        with self._lock:
            for key in [key for key in self._parts if not of or key in of]:
                for replica in [*self._parts[key]]:
                    if key not in keep or (replica < before and replica not in pinned):
                        self._remove(key, replica)
                if key in self._parts and before > 0:
                    complete = sorted(replica for replica in self._parts[key] if replica >= before)
                    self._spared[key] = frozenset([*complete[:1], *pinned])

    def _check_room(self, where: Path, size_bytes: int) -> None:
        state = os.statvfs(where)
        free = state.f_bavail * state.f_frsize
        with self._lock:
            sizes = [part.size_bytes for of_key in self._parts.values() for part in of_key.values()]
            sizes += [part.size_bytes for part in self._unlisted]
            coming = [*self._coming.values()]
        if size_bytes + sum(coming) + SPARE_BYTES > free:
            raise RunError(
                f"a part of {size_bytes:,} bytes does not fit on the disk of {where}, where {free:,} are free; "
                "free some space"
            )
        held = sum(sizes) + sum(coming)
        limit = self._limit_bytes or default_limit_bytes(free, sum(sizes))
        if held + size_bytes > limit or len(sizes) + len(coming) >= MAX_PARTS:
            raise RunError(
                f"a part of {size_bytes:,} bytes does not fit the limit with the {len(sizes) + len(coming)} parts "
                f"here with {held:,} of {limit:,} bytes; let this provider keep more with --cache"
            )

    def on_finished(self, writer: "PartWriter", part: ReplicaPart) -> None:
        """A part is complete: it counts from now on, and an older one of its stage may go."""
        with self._lock:
            self._coming.pop(writer, None)
            if not writer.is_listed:
                self._unlisted.add(part)
                return
            known = self._parts.setdefault(part.key, {})
            before = known.get(part.replica)
            known[part.replica] = part
            if before is not None and before.path is not None and before.path != part.path:
                before.path.unlink(missing_ok=True)
            for replica in sorted(known)[:-KEPT]:
                if replica not in self._spared.get(part.key, ()):
                    self._remove(part.key, replica)

    def on_discarded(self, writer: "PartWriter") -> None:
        """A part is given up: its space is free."""
        with self._lock:
            self._coming.pop(writer, None)

    def _remove(self, key: str, replica: int) -> None:
        part = self._parts[key].pop(replica)
        if not self._parts[key]:
            del self._parts[key]
            self._spared.pop(key, None)
        if part.path is not None:
            # A file that cannot be deleted is found at the next start, and deleted when it is old.
            with contextlib.suppress(OSError):
                part.path.unlink()

    def _take_up(self, folder: Path) -> None:
        try:
            entries = [*os.scandir(folder)]
        except OSError as error:
            raise _refused(folder, error) from None
        for entry in entries:
            path, name = Path(entry.path), _NAME.fullmatch(entry.name)
            with contextlib.suppress(OSError):
                old = entry.stat(follow_symlinks=False).st_mtime < time.time() - WEEK_SECONDS
                if entry.name.startswith(".") or (name is not None and old):
                    path.unlink()
                elif name is not None:
                    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                    part = ReplicaPart(name[1], int(name[2]), name[3], descriptor, path)
                    # All parts are loaded, because only the coordinator knows which are complete at all stages.
                    self._parts.setdefault(part.key, {})[part.replica] = part


class PartWriter:
    """A part that is being written. End it with `finish` or `discard`."""

    def __init__(
        self, files: PartFiles, key: str, replica: int, descriptor: int, path: Path | None, *, is_listed: bool = True
    ) -> None:
        self.is_listed = is_listed
        self._files = files
        self._key = key
        self._replica = replica
        self._descriptor = descriptor
        self._path = path
        self._digest = hashlib.sha256()
        self._hashed_bytes = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Add the bytes that follow."""
        self._digest.update(data)
        self._hashed_bytes += len(data)
        self.feed_unhashed(data)

    def feed_unhashed(self, data: bytes | memoryview) -> None:
        """Add the bytes that follow, which `finish` hashes. No `feed` may come after it."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise _refused(self._path, error) from None

    def finish(self, sha256: str | None = None) -> ReplicaPart:
        """The part is complete and counts from now on. PeerError when it does not have this hash."""
        self._hash_rest()
        found = self._digest.hexdigest()
        if sha256 is not None and found != sha256:
            raise PeerError(
                f"the part of {self._key} of replica {self._replica} arrived damaged (its sha256 is {found[:12]}…, "
                f"not {sha256[:12]}…)"
            )
        final = None if self._path is None else self._path.with_name(f"{self._key}@{self._replica}@{found}")
        try:
            if self._path is not None and final is not None:
                # After a power cut, the complete name must not belong to an incomplete file.
                os.fsync(self._descriptor)
                os.replace(self._path, final)
        except OSError as error:
            raise _refused(final, error) from None
        part = ReplicaPart(self._key, self._replica, found, self._descriptor, final)
        self._descriptor, self._path = -1, None
        self._files.on_finished(self, part)
        return part

    def _hash_rest(self) -> None:
        try:
            while data := os.pread(self._descriptor, _PIECE_BYTES, self._hashed_bytes):
                self._digest.update(data)
                self._hashed_bytes += len(data)
        except OSError as error:
            raise _refused(self._path, error) from None

    def discard(self) -> None:
        """Delete the file, unless the part is complete; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._files.on_discarded(self)
            if self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()


def _refused(path: Path | None, error: OSError) -> RunError:
    where = path or Path(tempfile.gettempdir())
    return RunError(f"cannot keep a part in {where}: {error.strerror or error}; free some space or check the folder")
