"""A real small disk for tests: an ext4 file system in a file, which fills up or breaks on request. Mounting it needs root.

What is full answers ENOSPC and what is broken EIO, from the kernel itself, to whatever process writes there: Python, SQLite and
Valkey alike.
"""

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1024 * 1024
_EXT4_IOC_SHUTDOWN = 0x8004_587D
_NO_LOG_FLUSH = 2
_BALLAST = ".ballast"


class SmallDisk:
    """Mounted at ``folder`` until ``close``."""

    def __init__(self, folder: Path, *, num_bytes: int) -> None:
        self.folder = folder
        self._image = folder.with_name(f"{folder.name}.img")
        folder.mkdir()
        with self._image.open("wb") as image:
            image.truncate(num_bytes)  # sparse: a disk of gigabytes costs what is written to it
        # blocks of a page, as on any larger disk: with smaller ones a full disk is a SIGBUS in SQLite's shared memory
        _run("mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^has_journal", str(self._image))
        self._mount()
        folder.chmod(0o700)

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Take all blocks but these. What ends within a block of its own can still grow to that block's end."""
        with (self.folder / _BALLAST).open("ab") as ballast:
            for piece_bytes in (64 * MIB, MIB, 1024):
                while self.free_bytes > leave_bytes:
                    begin = os.fstat(ballast.fileno()).st_size
                    try:
                        os.posix_fallocate(ballast.fileno(), begin, min(piece_bytes, self.free_bytes - leave_bytes))
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        break

    def make_room(self) -> None:
        (self.folder / _BALLAST).unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        facts = os.statvfs(self.folder)
        return facts.f_bavail * facts.f_frsize

    def break_down(self) -> None:
        """Answer EIO to every write, and to reads of what is not in memory, until it is mended."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Nobody may have a file of it open."""
        _run("umount", str(self.folder))
        self._mount()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)
        self._image.unlink(missing_ok=True)

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.folder))


@contextlib.contextmanager
def small_disk(folder: Path, *, num_bytes: int = 16 * MIB) -> Iterator[SmallDisk]:
    """Skips the test where no file system may be mounted."""
    try:
        disk = SmallDisk(folder, num_bytes=num_bytes)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small disk can be mounted here, which takes root and a loop device: {error}")
    try:
        yield disk
    finally:
        disk.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
