"""One copy on the host, for all ranks of a replica (``replicas.py``), of the weights that stream (``step/weights.py``).

Rank 0 makes the memory and fills it; the others map it and wait. From then on

frozen homes    are only read.
trained homes   are written by the rank that owns the tensor, between two moments at which ranks wait for each other: all have
                passed the exchange of norms (``shared_step.py``), before which each has ended its copies from homes; and none
                passes the barrier after the update before all owners are done. So nobody reads what is being written.

What is allocated: the homes, each beginning at a multiple of 512 bytes, once for the machine. Each rank's meter counts its equal
part of their bytes, on the host, as weights. On CUDA each rank pins all of it for its own card.
"""

from collections import deque
from collections.abc import Sequence

import torch

from optimizer.base.errors import HeadroomError, OutOfHostMemory, RanksDiffer, SharedMemoryRefused
from optimizer.base.serialize import from_json, to_json
from optimizer.formats.ownership import part_of_bytes
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.tiers.shared_memory import MemoryAddress, SharedMemory, place_pieces
from optimizer.runtime.tiers.tiers import Tiers


class SharedHomes:
    """The homes of one rank's streamed weights, in memory that all ranks have."""

    def __init__(self, ranks: Ranks, tiers: Tiers) -> None:
        self._ranks = ranks
        self._tiers = tiers
        self._pieces: deque[torch.Tensor] = deque()

    @property
    def fills(self) -> bool:
        """True on the one rank that writes the first numbers."""
        return self._ranks.is_first

    def make(self, sizes: Sequence[int]) -> None:
        """Room for homes of so many bytes, the same on each rank. Raises OutOfHostMemory and SharedMemoryRefused on all alike
        where one of them cannot have it, RanksDiffer where they ask for other sizes.
        """
        # Models are built in different times.
        self._ranks.barrier()
        starts, num_bytes = place_pieces(list(sizes))
        self._check_equal(num_bytes, len(sizes))
        if not num_bytes:
            return
        memory = self._map(num_bytes)
        self._tiers.adopt(
            memory, counted_bytes=part_of_bytes(sum(sizes), rank=self._ranks.rank, num_ranks=self._ranks.num_ranks)
        )
        self._pieces.extend(memory.piece(start, size) for start, size in zip(starts, sizes, strict=True))

    def take(self) -> torch.Tensor:
        """The next home, in the order of ``make``."""
        return self._pieces.popleft()

    def wait_until_filled(self) -> None:
        """Raises RankLost."""
        self._ranks.barrier()

    # Helpers.

    def _map(self, num_bytes: int) -> SharedMemory:
        """The same memory on each rank."""
        memory: SharedMemory | None = None
        error: HeadroomError | None = None
        try:
            memory = SharedMemory.make(num_bytes) if self._ranks.is_first else None
        except (OutOfHostMemory, SharedMemoryRefused) as refusal:
            error = refusal
        address = self._ranks.exchange_json(None if memory is None else to_json(memory.address))[0]
        if memory is None and address is not None:
            try:
                memory = SharedMemory.open(from_json(MemoryAddress, address, path="address"))
            except SharedMemoryRefused as refusal:
                error = refusal
        # Also so that rank 0 keeps its file open until all have it.
        words = [said for said in self._ranks.exchange_json(None if error is None else error.message) if said is not None]
        if memory is not None:
            memory.close_file()
        if error is not None:
            raise error
        if words or memory is None:
            raise SharedMemoryRefused(f"another rank has no memory to share: {words[0]}", hint="See that rank's own error.")
        return memory

    def _check_equal(self, num_bytes: int, num_homes: int) -> None:
        found = self._ranks.exchange([num_bytes, num_homes])
        if any(row != found[0] for row in found):
            shown = ", ".join(f"rank {rank}: {int(count)} tensors" for rank, (_, count) in enumerate(found))
            raise RanksDiffer(
                f"ranks have other weights to share ({shown}, {int(found[0][0])} bytes on rank 0)",
                hint="All ranks of a run need the same model and the same plan.",
            )
