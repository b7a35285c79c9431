"""The disk tier: one scratch file that is preallocated, read and written by position, and gone when the run is.

The file has no name (it is unlinked as soon as it is open), so that nothing is left of it however the process ends, and it
grows in steps whose blocks are claimed from the file system before anything is written to them: a full disk is met when room
is asked for, not when bytes are on their way. File systems that copy on write (btrfs) may still refuse a write later; that is
DiskFull as well.
"""

import errno
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import ClassVar

from optimizer.base.categories import Lane, Link, Tier
from optimizer.base.errors import DiskFull
from optimizer.base.units import MIB, format_bytes
from optimizer.runtime.tiers.stores import Place, Room

GROWTH_BYTES = 64 * MIB
_ALIGNMENT_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, no larger file allowed."""


class DiskStore:
    """Scratch in a folder. Raises OSError where the folder cannot be written to."""

    tier: ClassVar[Tier] = "disk"
    write_link: ClassVar[Link] = "host_to_disk"
    read_link: ClassVar[Link] = "disk_to_host"
    lane: ClassVar[Lane] = "disk"

    def __init__(self, folder: Path, *, growth_bytes: int = GROWTH_BYTES) -> None:
        self.folder = folder
        self.room = Room()
        self._growth_bytes = growth_bytes
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="headroom-scratch-", buffering=0) as file:
            self._file = os.dup(file.fileno())
        # Also where nobody calls ``close``, because what was to call it failed to come to be.
        self._close = weakref.finalize(self, os.close, self._file)
        self._lock = threading.Lock()
        self._end = 0
        self._file_bytes = 0
        self._free: dict[int, list[int]] = {}

    @property
    def file_bytes(self) -> int:
        """Claimed from the file system."""
        return self._file_bytes

    def take(self, num_bytes: int, *, is_made: bool = False) -> Place:
        """is_made: it always is."""
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                offset = free.pop()
            else:
                offset = self._end
                end = offset + -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                if end > self._file_bytes:
                    self._grow_to(end)
                self._end = end
        self.room.add(num_bytes)
        return Place(offset, num_bytes)

    def give_back(self, place: Place) -> None:
        with self._lock:
            self._free.setdefault(place.num_bytes, []).append(place.index)
        self.room.add(-place.num_bytes)

    def write(self, place: Place, data: memoryview, *, offset: int) -> None:
        position, left = place.index + offset, data
        while left:
            try:
                written = os.pwrite(self._file, left, position)
            except OSError as error:
                raise self._translated(error, len(left)) from error
            position, left = position + written, left[written:]

    def read(self, place: Place, into: memoryview, *, offset: int) -> None:
        position, left = place.index + offset, into
        while left:
            num_read = os.preadv(self._file, [left], position)
            if num_read == 0:
                raise EOFError(
                    f"the scratch file ends at {position:,}, {len(left):,} bytes before what was written to it"
                )
            position, left = position + num_read, left[num_read:]

    def flush(self) -> None:
        """Wait until all that was written is on the disk, and have the kernel forget it: what is read next comes from there."""
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._close()

    def _grow_to(self, num_bytes: int) -> None:
        """In steps; where the disk has no room for a whole step, by what is needed."""
        needed_bytes = num_bytes - self._file_bytes
        if needed_bytes <= 0:
            return
        stepped_bytes = -(-needed_bytes // self._growth_bytes) * self._growth_bytes
        try:
            os.posix_fallocate(self._file, self._file_bytes, stepped_bytes)
            self._file_bytes += stepped_bytes
        except OSError as error:
            if error.errno not in _FULL:
                raise
            try:
                os.posix_fallocate(self._file, self._file_bytes, needed_bytes)
            except OSError as exact_error:
                raise self._translated(exact_error, needed_bytes) from exact_error
            self._file_bytes += needed_bytes

    def _translated(self, error: OSError, needed_bytes: int) -> Exception:
        if error.errno not in _FULL:
            return error
        return DiskFull(
            f"the disk of the scratch folder {self.folder} is full: {format_bytes(needed_bytes)} more were needed, "
            f"{format_bytes(self._file_bytes)} were claimed, {format_bytes(self._free_bytes())} are free ({error.strerror})",
            hint="Free the disk, name another scratch folder, or choose a plan that keeps less on disk.",
            folder=str(self.folder),
            requested_bytes=needed_bytes,
            in_use_bytes=self._file_bytes,
            free_bytes=self._free_bytes(),
        )

    def _free_bytes(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize
