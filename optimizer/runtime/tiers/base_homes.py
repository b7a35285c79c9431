"""One copy on the host, for all jobs of a machine, of the frozen weights of one base model that stream (``step/weights.py``).

Jobs meet in a folder. The first makes the memory, fills it, and leaves a note there on where it is; a later one maps it and reads
no file. A lock on a file beside the notes is held from looking for the memory until it is filled, so of two jobs that begin at
once one waits for the other. Nobody owns the memory: each job that has it mapped keeps it open for those that come, and the
kernel takes it back with the last of them. A job that was killed leaves a note that leads nowhere, which the next job removes.
The memory begins with a page that says what is in it, so a process number and a file number that were given out anew cannot lead
to other numbers.

What is allocated: as without sharing, each home by itself as it is taken, counted whole on the host by every job as weights. The
machine has them once; ``estimate/sharing.py`` adds them up so. On CUDA each job pins all of it for its own card.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from optimizer.base.errors import InvalidInput, SharedMemoryRefused
from optimizer.base.serialize import from_json, to_json
from optimizer.runtime.tiers.shared_memory import MemoryAddress, SharedMemory, place_pieces
from optimizer.runtime.tiers.tiers import Tiers

_SIGN_BYTES: Final = 4096
_TOKEN_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True)
class BasePlace:
    """The base model of a job, and where it meets the others of the machine that have the same."""

    folder: Path
    """The same for all jobs of the machine; made where there is none."""
    name: str
    """Jobs with the same name have the same frozen numbers in the same form."""


@dataclass(frozen=True, kw_only=True)
class _Note:
    address: MemoryAddress
    token: str
    """The first bytes of the memory, in hex."""


class BaseHomes:
    """The homes of one job's frozen streamed weights, in memory that other jobs of the same base have."""

    def __init__(self, place: BasePlace, tiers: Tiers) -> None:
        self._place = place
        self._tiers = tiers
        self._pieces: deque[torch.Tensor] = deque()
        self._memory: SharedMemory | None = None
        self._lock: int | None = None
        self._note_file = place.folder
        self._notes: list[_Note] = []
        self._token = ""
        self.is_found = False
        """True if the memory was there, with the numbers of another job in it."""

    @property
    def fills(self) -> bool:
        """True if no other job has done it, and this one is to write the numbers."""
        return self._lock is not None

    def make(self, sizes: Sequence[int]) -> None:
        """Room for homes of so many bytes. Waits for a job that fills the same. Raises OutOfHostMemory, SharedMemoryRefused."""
        starts, num_bytes = place_pieces(list(sizes))
        if not num_bytes:
            return
        digest = hashlib.sha256(json.dumps([self._place.name, list(sizes)]).encode()).hexdigest()[:_TOKEN_BYTES]
        self._place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._note_file = self._place.folder / f"{digest}.json"
        self._lock = os.open(self._place.folder / f"{digest}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._find(num_bytes + _SIGN_BYTES)
            if self._memory is None:
                self._memory = SharedMemory.make(num_bytes + _SIGN_BYTES)
                self._token = secrets.token_hex(_TOKEN_BYTES)
                self._sign().copy_(_as_bytes(self._token))
            else:
                self.is_found = True
                self._leave_note()
                self._unlock()
            self._tiers.adopt(self._memory, counted_bytes=0)
        except BaseException:
            self.close()
            raise
        memory = self._memory
        self._pieces.extend(
            memory.piece(_SIGN_BYTES + start, size) for start, size in zip(starts, sizes, strict=True)
        )

    def take(self) -> torch.Tensor:
        """The next home, in the order of ``make``, counted from now on."""
        piece = self._pieces.popleft()
        self._tiers.count_home(piece)
        return piece

    def wait_until_filled(self) -> None:
        """Let the others in: all homes have their numbers by now."""
        if self.fills:
            self._leave_note()
            self._unlock()

    def close(self) -> None:
        """Be found by nobody more; who has the memory mapped keeps it. Of no effect the second time."""
        self._unlock()
        if self._memory is not None:
            self._memory.close_file()

    # Helpers.

    def _find(self, num_bytes: int) -> None:
        """The memory of the first note that leads to it. Notes that lead nowhere are dropped."""
        for note in self._read_notes():
            if note.address.num_bytes != num_bytes:
                continue
            try:
                memory = SharedMemory.open(note.address)
            except SharedMemoryRefused:
                continue
            if bytes(memory.piece(0, 2 * _TOKEN_BYTES).numpy()) != note.token.encode():
                memory.close_file()
                continue
            self._notes.append(note)
            if self._memory is None:
                self._memory, self._token = memory, note.token
            else:
                memory.close_file()

    def _read_notes(self) -> list[_Note]:
        try:
            return [from_json(_Note, document, path="note") for document in json.loads(self._note_file.read_bytes())]
        except (OSError, ValueError, InvalidInput):
            return []

    def _leave_note(self) -> None:
        """Beside those of the others that can still be opened. Without room on the disk nobody finds this memory, no more."""
        assert self._memory is not None
        notes = [*self._notes, _Note(address=self._memory.address, token=self._token)]
        staged = self._note_file.with_suffix(".new")
        with contextlib.suppress(OSError):
            staged.write_text(json.dumps([to_json(note) for note in notes]))
            staged.replace(self._note_file)

    def _sign(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory.piece(0, 2 * _TOKEN_BYTES)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
