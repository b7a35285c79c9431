"""Host memory that processes of one machine have in common, so that what all of them read is there once.

It is a file in memory without a name (``memfd_create``), in no folder: the size of /dev/shm does not limit it, and nothing is
left behind. The kernel takes it back when the last process that has it mapped is gone, however that one ended. Others open it
through /proc of the process that made it, for which they must run as the same user and see its process number. Once made it
keeps its size (sealed): nobody can cut it under those who read it.

What is written by one process is there for all others, who learn of it by other means (a barrier); nothing here orders them.
"""

import fcntl
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from optimizer.base.errors import OutOfHostMemory, SharedMemoryRefused

_NAME: Final = "headroom-weights"
"""Shown in /proc/PID/maps; names no file."""
_ALIGNMENT_BYTES: Final = 512
_MEMORY_FILE: Final = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class MemoryAddress:
    """The way to a piece of memory that another process of this machine has open."""

    process: int
    file: int
    """Its number in that process."""
    inode: int
    num_bytes: int


class SharedMemory:
    """A piece of memory, mapped. It stays as long as a tensor over it does."""

    def __init__(self, file: int, num_bytes: int) -> None:
        """file: owned from now on."""
        self.num_bytes = num_bytes
        self._file: int | None = file
        self._mapped = mmap.mmap(file, num_bytes)

    @classmethod
    def make(cls, num_bytes: int) -> "SharedMemory":
        """New memory, of zeros. Raises OutOfHostMemory where the machine has less left, SharedMemoryRefused where it has none
        of this kind.
        """
        total_bytes, available_bytes = _memory_of_machine()
        if num_bytes > available_bytes:
            raise OutOfHostMemory(
                requested_bytes=num_bytes,
                in_use_bytes=total_bytes - available_bytes,
                budget_bytes=total_bytes,
                bytes_by_category={},
                moment="for the weights that all ranks share",
                category="weights",
                hint="Free memory of the machine, or choose a plan that leaves more weights on the devices or on the disk.",
            )
        try:
            file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _refused("make memory that processes share", error) from error
        try:
            os.ftruncate(file, num_bytes)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(file, num_bytes)
        except OSError as error:
            os.close(file)
            raise _refused("make memory that processes share", error) from error

    @classmethod
    def open(cls, address: MemoryAddress) -> "SharedMemory":
        """Map the memory of another process, while that one keeps it open. Raises SharedMemoryRefused."""
        try:
            file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _refused("open the memory of another rank", error) from error
        try:
            found = os.fstat(file)
            if (found.st_ino, found.st_size) != (address.inode, address.num_bytes):
                # A process of the same number in another container.
                raise OSError(f"process {address.process} here is another than the rank that made it")
            return cls(file, address.num_bytes)
        except OSError as error:
            os.close(file)
            raise _refused("open the memory of another rank", error) from error

    @property
    def address(self) -> MemoryAddress:
        """For other processes, until ``close_file``."""
        assert self._file is not None
        return MemoryAddress(
            process=os.getpid(), file=self._file, inode=os.fstat(self._file).st_ino, num_bytes=self.num_bytes
        )

    def close_file(self) -> None:
        """Once all others have it mapped. Of no effect the second time."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def piece(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of it as a tensor with a storage of its own, which keeps all of it mapped."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=num_bytes, offset=start)


def place_pieces(sizes: list[int]) -> tuple[list[int], int]:
    """The starts of pieces of so many bytes, one after the other and aligned, and the bytes of all."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return starts, end


def _memory_of_machine() -> tuple[int, int]:
    """Bytes that the machine has, and has left. What is mapped is taken only as it is written to, so the kernel itself refuses
    nothing; a control group's limit is the budget's business.
    """
    sizes = dict(re.findall(r"^(\w+): *(\d+) kB", _MEMORY_FILE.read_text(), flags=re.MULTILINE))
    return int(sizes["MemTotal"]) * 1024, int(sizes["MemAvailable"]) * 1024


def _refused(what: str, error: OSError) -> SharedMemoryRefused:
    return SharedMemoryRefused(
        f"this machine does not let a rank {what}: {error.strerror or error}",
        hint="Ranks need memfd_create and each other's /proc/PID/fd: let all run as one user in one container, or choose a plan "
        "whose weights stay on the devices.",
    )
