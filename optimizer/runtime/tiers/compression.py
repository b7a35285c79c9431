"""Packs a storage's bytes for a trip and unpacks them: as they are, as bf16, or as int8 with one fp32 scale per 256 elements.

A packed storage is a run of chunks, each with its scales first (int8) and then its values, so that it can be cut between chunks.
Both ways go through scratch on the device that is made once (``packing.scratch_bytes``), so a trip allocates nothing but what
it is for. On CUDA everything runs on the stream that is current: the copy stream, whose order makes the scratch safe to share.

Errors: bf16 rounds each value to 8 significant bits (relative 2^-9). int8 rounds to a multiple of a 127th of the largest value
of its 256 (absolute, half a step). A block of 256 that holds an infinity or NaN comes back as NaN.
"""

import threading
from collections.abc import Iterator, Sequence

import torch

from optimizer.formats.transfer_sizes import (
    FLOAT_BYTES,
    SCALE_BLOCK_ELEMENTS,
    SCALE_BYTES,
    chunk_elements,
    packed_bytes,
)
from optimizer.plan.activations import Compression

_LARGEST_FLOAT = torch.finfo(torch.float32).max
_LARGEST_INT8 = 127.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number: a block of zeros has a scale too."""


class Scratch:
    """The packer's buffers on one device."""

    def __init__(self, compress: Compression, *, device: torch.device) -> None:
        num_elements = chunk_elements(device.type)
        num_bytes = packed_bytes(4 * num_elements, dtype="float32", compress=compress)
        self.packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.lock = threading.Lock()
        """A chunk's ops are queued together: fetching on CUDA is a thread's own."""
        num_wide = num_elements if compress == "int8" else 0
        self.wide = torch.empty(num_wide, dtype=torch.float32, device=device)


class Packing:
    """The form of one storage on its trip."""

    __slots__ = ("_chunk_elements", "_scratch", "compress", "dtype", "num_bytes", "packed_bytes")

    def __init__(
        self, num_bytes: int, *, dtype: torch.dtype, compress: Compression = "none", scratch: Scratch | None = None
    ) -> None:
        self.num_bytes = num_bytes
        self.packed_bytes = num_bytes
        if compress != "none":
            self.packed_bytes = packed_bytes(num_bytes, dtype=str(dtype).removeprefix("torch."), compress=compress)
        # What would not become smaller travels as it is.
        self.compress: Compression = compress if self.packed_bytes < num_bytes else "none"
        self.dtype = dtype
        self._scratch = scratch
        self._chunk_elements = chunk_elements(scratch.packed.device.type) if scratch is not None else 0

    def units(self, max_packed_bytes: int) -> list["Unit"]:
        """Cut into pieces that can travel alone, each at most ``max_packed_bytes`` when packed."""
        if self.compress == "none":
            step_bytes = packed_step_bytes = max_packed_bytes
        else:
            size = FLOAT_BYTES[str(self.dtype).removeprefix("torch.")]
            chunk_bytes = self._chunk_elements * size
            packed_chunk_bytes = packed_bytes(
                chunk_bytes, dtype=str(self.dtype).removeprefix("torch."), compress=self.compress
            )
            num_chunks = max_packed_bytes // packed_chunk_bytes
            step_bytes, packed_step_bytes = num_chunks * chunk_bytes, num_chunks * packed_chunk_bytes
        return [
            Unit(
                start=index * step_bytes,
                end=min(self.num_bytes, (index + 1) * step_bytes),
                packed_start=index * packed_step_bytes,
                packed_end=min(self.packed_bytes, (index + 1) * packed_step_bytes),
            )
            for index in range(-(-self.num_bytes // step_bytes))
        ]

    def pack(self, source: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """source: bytes on the device, a whole unit; pieces: bytes on the host, one after another, of the packed size."""
        if self.compress == "none":
            copy_to_pieces(source, pieces)
            return
        assert self._scratch is not None
        start = 0
        for values in self._chunks(source):
            with self._scratch.lock:
                packed = self._pack_chunk(values)
                copy_to_pieces(packed, list(cut_pieces(pieces, start, start + packed.numel())))
            start += packed.numel()

    def unpack(self, pieces: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Undo ``pack``."""
        if self.compress == "none":
            copy_from_pieces(pieces, target)
            return
        assert self._scratch is not None
        start = 0
        for values in self._chunks(target):
            with self._scratch.lock:
                packed = self._packed_view(values.numel())
                copy_from_pieces(list(cut_pieces(pieces, start, start + packed.numel())), packed)
                self._unpack_chunk(packed, values)
            start += packed.numel()

    def _chunks(self, data: torch.Tensor) -> Iterator[torch.Tensor]:
        values, step = data.view(self.dtype), self._chunk_elements
        return (values[start : start + step] for start in range(0, values.numel(), step))

    def _packed_view(self, num_elements: int) -> torch.Tensor:
        assert self._scratch is not None
        size = 2 * num_elements
        if self.compress == "int8":
            size = num_elements + SCALE_BYTES * -(-num_elements // SCALE_BLOCK_ELEMENTS)
        return self._scratch.packed[:size]

    def _pack_chunk(self, values: torch.Tensor) -> torch.Tensor:
        packed = self._packed_view(values.numel())
        if self.compress == "bf16":
            packed.view(torch.bfloat16).copy_(values)
            return packed
        scales, codes, wide = self._parts(packed, values.numel())
        flat = wide.view(-1)
        own, rest = flat[: values.numel()], flat[values.numel() :]
        rest.zero_()
        # The maximum of what is made absolute in place, and then copied again: a norm takes ten times as long on the CPU.
        own.copy_(values).abs_()
        torch.amax(wide, dim=1, out=scales)
        # The minus infinities of a mask, whose block would come back as NaN. An overflow is in the loss by then.
        scales.clamp_(max=_LARGEST_FLOAT).mul_(1 / _LARGEST_INT8).clamp_(min=_SMALLEST_SCALE)
        own.copy_(values)
        wide.div_(scales.unsqueeze(1)).clamp_(-_LARGEST_INT8, _LARGEST_INT8).round_()
        codes.copy_(own)
        return packed

    def _unpack_chunk(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        if self.compress == "bf16":
            values.copy_(packed.view(torch.bfloat16))
            return
        scales, codes, wide = self._parts(packed, values.numel())
        flat = wide.view(-1)
        flat[: values.numel()].copy_(codes)
        wide.mul_(scales.unsqueeze(1))
        values.copy_(flat[: values.numel()])

    def _parts(self, packed: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scales, codes, and the chunk in fp32, one row for each scale."""
        assert self._scratch is not None
        num_rows = -(-num_elements // SCALE_BLOCK_ELEMENTS)
        scales = packed[: SCALE_BYTES * num_rows].view(torch.float32)
        codes = packed[SCALE_BYTES * num_rows :].view(torch.int8)
        wide = self._scratch.wide[: num_rows * SCALE_BLOCK_ELEMENTS].view(num_rows, SCALE_BLOCK_ELEMENTS)
        return scales, codes, wide


class Unit:
    """A piece of a storage, in bytes before and after packing."""

    __slots__ = ("end", "packed_end", "packed_start", "start")

    def __init__(self, *, start: int, end: int, packed_start: int, packed_end: int) -> None:
        self.start = start
        self.end = end
        self.packed_start = packed_start
        self.packed_end = packed_end


def copy_to_pieces(source: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Bytes of the device to the host, without waiting for them on CUDA."""
    start = 0
    for piece in pieces:
        piece.copy_(source[start : start + piece.numel()], non_blocking=True)
        start += piece.numel()


def copy_from_pieces(pieces: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Bytes of the host to the device, without waiting for them on CUDA."""
    start = 0
    for piece in pieces:
        target[start : start + piece.numel()].copy_(piece, non_blocking=True)
        start += piece.numel()


def cut_pieces(pieces: Sequence[torch.Tensor], start: int, end: int) -> Iterator[torch.Tensor]:
    """The bytes from ``start`` to ``end`` of what lies in several pieces."""
    offset = 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(end - offset, piece.numel())
        if low < high:
            yield piece[low:high]
        offset += piece.numel()
