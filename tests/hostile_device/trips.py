"""Trips between the tiers without a model: each rule of ``optimizer/runtime/tiers`` by itself, in a moment."""

from pathlib import Path
from typing import Any

import torch

from optimizer.formats.transfer_sizes import ARENA_SLAB_BYTES
from optimizer.runtime.tiers.tiers import Tiers

CPU = torch.device("cpu")
SIZE = 3000


def _numbers(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _bytes_of(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.view(torch.uint8).clone().numpy().tobytes() for tensor in tensors]


def offload_and_fetch(scratch: Path, *, place: Any = "host", compress: Any = "none") -> Any:
    """Blocks' storages leave in groups, their memory is used again at once, and they come back in the other order."""
    tiers, seen = Tiers(device=CPU, scratch=scratch), []
    for turn in range(3):
        copies = []
        for index in range(4):
            tiers.begin_group()
            source = _numbers(10 * turn + index).mul_(2)
            copies.append(
                tiers.offload(
                    source.untyped_storage(), category="activations", dtype=source.dtype, place=place, compress=compress
                )
            )
            del source
            torch.empty(SIZE).fill_(7.0)
        tiers.settle()
        tiers.prefetch(copies[::-1])
        fetched = [tiers.fetch(copy, category="activations") for copy in reversed(copies)]
        del copies
        # One is never used: its memory goes at once.
        del fetched[1]
        torch.empty(SIZE).fill_(9.0)
        seen += _bytes_of([copy.wait() for copy in fetched])
        del fetched
    tiers.close()
    return seen


def many_slabs(scratch: Path) -> Any:
    """A storage larger than a slab of the arena, and the next one in the room behind it."""
    tiers = Tiers(device=CPU, scratch=scratch)
    sources = [_numbers(size, size) for size in (ARENA_SLAB_BYTES // 4 + 5, 100)]
    copies = [tiers.offload(source.untyped_storage(), category="activations") for source in sources]
    tiers.settle()
    seen = [tiers.fetch(copy, category="activations").wait().view(torch.float32).sum().item() for copy in copies]
    tiers.close()
    return seen


def copies_of_ranges(scratch: Path, *, beside: bool = True) -> Any:
    """Sources are dropped or written over as soon as that is allowed."""
    tiers, seen = Tiers(device=CPU, scratch=scratch), []
    home = tiers.host_buffer(SIZE, dtype=torch.float32, category="weights")
    target = torch.zeros(SIZE)
    for turn in range(7):
        source = _numbers(turn).mul_(3)
        out = tiers.copy_to_host(source, home, beside=beside)
        if turn % 2:
            out.finish()
            seen.append(home.numpy().tobytes())
        else:
            out.wait()
        source.zero_()
        del source, out
        torch.empty(SIZE).fill_(5.0)
        back = tiers.copy_to_device(home, target, beside=beside)
        back.wait()
        seen += _bytes_of([target * 2])
        target.mul_(0)
        back.finish()
        home.mul_(-1)
    tiers.close()
    return seen


def sources_that_nobody_waits_for(scratch: Path) -> Any:
    """Copies to the host that are forgotten: their sources stay for a few more."""
    tiers = Tiers(device=CPU, scratch=scratch)
    home = tiers.host_buffer((9, SIZE), dtype=torch.float32, category="weights")
    for turn in range(9):
        tiers.copy_to_host(_numbers(turn).mul_(3), home[turn])
        torch.empty(SIZE).fill_(5.0)
    last = tiers.copy_to_host(torch.zeros(1), tiers.host_buffer(1, dtype=torch.float32, category="weights"))
    last.finish()
    seen = home.numpy().tobytes()
    tiers.close()
    return seen


def into_memory_that_nothing_uses(scratch: Path) -> Any:
    """A copy that need not wait for compute runs before it, and compute waits for the copy."""
    tiers, seen = Tiers(device=CPU, scratch=scratch), []
    home = tiers.host_buffer(SIZE, dtype=torch.float32, category="weights")
    target = torch.zeros(SIZE)
    for turn in range(3):
        out = tiers.copy_to_host(_numbers(turn) + target.sum(), home)
        out.finish()
        home.add_(1.0)
        tiers.copy_to_device(home, target, behind_compute=False).wait()
        seen += _bytes_of([target + 1])
    tiers.close()
    return seen


def save_and_load(scratch: Path) -> Any:
    """Ranges that overlap, written over as soon as ``save`` returns, in more slabs than there are."""
    tiers, seen = Tiers(device=CPU, scratch=scratch), []
    size = 12 * 1024 * 1024 // 4
    buffer = tiers.stored_buffer(4 * size, place="disk")
    source, target = _numbers(1, size), torch.zeros(size)
    for turn in range(3):
        source.mul_(2)
        tiers.save(source, buffer)
        source.add_(1)
        tiers.save(source[: size // 2], buffer, offset_bytes=2 * size)
        source.add_(1)
        target.zero_()
        copy = tiers.load(buffer, target)
        if turn == 1:
            copy.finish()
        copy.wait()
        seen.append(_checksum(target))
        # Into memory that compute still writes to, and read at once after.
        fresh = torch.full((size // 2,), float(turn))
        tiers.load(buffer, fresh, offset_bytes=2 * size).wait()
        seen.append(_checksum(fresh))
    tiers.close()
    return seen


def small_saves_and_loads(scratch: Path) -> Any:
    """Many over the same range, none waited for before the next is begun: what is loaded is what was saved before it."""
    tiers = Tiers(device=CPU, scratch=scratch)
    buffer = tiers.stored_buffer(4 * SIZE, place="disk")
    targets = []
    for turn in range(12):
        tiers.save(_numbers(turn).mul_(2), buffer)
        tiers.save(_numbers(turn + 50, SIZE // 2), buffer)
        target = torch.zeros(SIZE)
        targets.append((target, tiers.load(buffer, target)))
    for _, copy in targets:
        copy.wait()
    seen = _bytes_of([target for target, _ in targets])
    tiers.close()
    return seen


def _checksum(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).view(-1, 4096 if tensor.numel() % 1024 == 0 else 4)[:: 7].clone().numpy().tobytes()


def ranges_of_the_host(scratch: Path) -> Any:
    """Host tensors to and from a store, in the order in which that was begun."""
    tiers, seen = Tiers(device=CPU, scratch=scratch), []
    buffer = tiers.stored_buffer(4 * SIZE, place="disk")
    for turn in range(12):
        given, back = _numbers(turn), torch.zeros(SIZE)
        written = buffer.write(given)
        half = buffer.write(_numbers(turn + 9, SIZE // 2), offset_bytes=0)
        reading = buffer.read(back)
        after = buffer.write(torch.full((SIZE,), 3.0))
        reading.wait()
        seen.append(back.numpy().tobytes())
        for transfer in (written, half, after):
            transfer.wait()
        given.zero_()
    tiers.close()
    return seen


def close_with_copies_under_way(scratch: Path) -> Any:
    """Memory is unpinned when nothing is on its way any more."""
    tiers = Tiers(device=CPU, scratch=scratch)
    home = tiers.host_buffer(SIZE, dtype=torch.float32, category="weights")
    source = _numbers(0)
    tiers.copy_to_host(source, home)
    tiers.close()
    return home.numpy().tobytes()
