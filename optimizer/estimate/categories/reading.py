"""Bytes on each tier while a model is read from files, tensor by tensor to its place, as ``runtime/layers/filling.py`` does.
Torch-free.

A tensor that the CPU device keeps as the file has it is read where it stays. Any other is on the host as the file has it
while it is brought to the device, converted or packed; one that streams is converted on the host and written to its home, a
piece at a time. A matrix is packed on the device, on the host where that is the processor; beside it and the result there is
what packing one piece takes.

*Not modelled*: a checkpoint that is packed already, of which a matrix is on the host in fp32; stacked experts that
are packed one by one, of which one more is there; a tied tensor that files have twice, and both copies are compared; what
bitsandbytes holds inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from optimizer.estimate.categories.weights import packed_bytes
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.plan.weights import DTYPE_BYTES, PACKED_SIZES, WeightsDtype, WeightsPlan
from optimizer.profile.trained import BaseSize

Way = Literal["to the device", "through the host", "to the host"]
"""to the host: to a home there, on the disk or in a store. through the host: made there, and copied to the device."""
_FILE_DTYPES: Final[Mapping[str, WeightsDtype]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FP32_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True)
class TierPeaks:
    """Most bytes on each tier."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    together_bytes: int = 0
    """Most on device and host at once: what a process holds where the processor is the device."""


class Level:
    """Bytes that are there, and the most that were."""

    def __init__(self, *, device: int, host: int = 0) -> None:
        self.device, self.host = device, host
        self.device_peak, self.host_peak, self.together_peak = device, 0, device

    def reach(self, *, device: int = 0, host: int = 0) -> None:
        """So many more for a moment."""
        self.reach_in_all(self.device + device, self.host + host)

    def reach_in_all(self, device: int, host: int) -> None:
        self.device_peak, self.host_peak = max(self.device_peak, device), max(self.host_peak, host)
        self.together_peak = max(self.together_peak, device + host)

    def peaks(self, *, disk_bytes: int) -> TierPeaks:
        return TierPeaks(
            device_bytes=self.device_peak,
            host_bytes=self.host_peak,
            disk_bytes=disk_bytes,
            together_bytes=self.together_peak,
        )


def file_dtype(weights_dtype: str) -> WeightsDtype:
    """weights_dtype: as a profile has it; fp32 where the config names none."""
    return _FILE_DTYPES.get(weights_dtype, "fp32")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The way in which the tensors of a model are read."""

    weights: WeightsPlan
    file_dtype: WeightsDtype
    """The files'."""
    packs: bool
    """Matrices are packed, as far as they can be."""
    on_cuda: bool
    has_homes: bool = False
    """True where room for what streams is there already."""

    def stay_bytes(self, size: BaseSize) -> int:
        """Bytes that a tensor takes where it stays."""
        packs = size.packs and self.packs
        return packed_bytes(size, self.weights) if packs else size.num_elements * self.weights.bytes_per_element

    def read(self, level: Level, size: BaseSize, way: Way) -> None:
        """One tensor, to its place."""
        if way == "to the device":
            self._to_device(level, size)
        elif size.packs and self.packs:
            self._pack_on_host(level, size, way)
        else:
            self._to_host(level, size, way)

    def _to_device(self, level: Level, size: BaseSize) -> None:
        raw, converted, stays = self._raw(size), self._converted(size), self.stay_bytes(size)
        packing = packing_bytes(size, self.weights) if size.packs and self.packs else 0
        if self.on_cuda:
            level.reach(device=raw + converted, host=raw)
            level.reach(device=(converted or raw) + packing)
        elif packing:
            level.reach(device=converted, host=raw)
            level.reach(device=converted + packing, host=0 if converted else raw)
        else:
            level.reach(device=stays, host=raw if converted else 0)
        level.device += stays

    def _to_host(self, level: Level, size: BaseSize, way: Way) -> None:
        raw, converted, stays = self._raw(size), self._converted(size), self.stay_bytes(size)
        if way == "through the host":
            level.reach(host=raw + converted)
            level.reach(device=stays, host=converted or raw)
            level.device += stays
            return
        home = self._home(stays)
        level.reach(host=home + raw + converted)
        level.reach(host=home + (converted or raw) + self._piece(size.num_elements, self.weights.bytes_per_element))
        level.host += home

    def _pack_on_host(self, level: Level, size: BaseSize, way: Way) -> None:
        """Packed bytes and scales are two tensors with a home each; the scales wait until theirs is made."""
        raw, converted, stays = self._raw(size), self._converted(size), self.stay_bytes(size)
        codes = PACKED_SIZES[self.weights.frozen].code_bytes(size.num_elements)
        scales = stays - codes
        made = max(raw + converted, (converted or raw) + packing_bytes(size, self.weights))
        there = self._home(codes) if way == "to the host" else 0
        level.reach(device=made if self.on_cuda else 0, host=there + made)
        if way == "through the host":
            level.reach(device=stays, host=stays)
            level.device += stays
            return
        scale_bytes = PACKED_SIZES[self.weights.frozen].scale_element_bytes or self.weights.bytes_per_element
        level.reach(host=self._home(codes) + stays + self._piece(codes, 1))
        level.reach(host=self._home(stays) + scales + self._piece(scales // scale_bytes, scale_bytes))
        level.host += self._home(stays)

    def _raw(self, size: BaseSize) -> int:
        return size.num_elements * DTYPE_BYTES[self.file_dtype]

    def _converted(self, size: BaseSize) -> int:
        """Bytes of the tensor in the plan's dtype; 0 where the file has it so."""
        return size.num_elements * self.weights.bytes_per_element if self.file_dtype != self.weights.dtype else 0

    def _home(self, num_bytes: int) -> int:
        return num_bytes if self.weights.place == "host" and not self.has_homes else 0

    def _piece(self, num_elements: int, element_bytes: int) -> int:
        return min(num_elements, PIECE_ELEMENTS) * element_bytes


def packing_bytes(size: BaseSize, weights: WeightsPlan) -> int:
    """Most bytes beside a matrix while it is packed in pieces (``runtime/layers/quantize.py``), its result among them."""
    num_elements, num_rows = size.num_elements, size.num_scales
    if num_elements <= PIECE_ELEMENTS:
        return _piece_bytes(num_elements, num_rows, weights)
    if PACKED_SIZES[weights.frozen].block_elements:
        return packed_bytes(size, weights) + _piece_bytes(PIECE_ELEMENTS, 0, weights)
    rows = min(num_rows, max(1, PIECE_ELEMENTS * num_rows // num_elements))
    return packed_bytes(size, weights) + _piece_bytes(rows * (num_elements // num_rows), rows, weights)


def _piece_bytes(num_elements: int, num_rows: int, weights: WeightsPlan) -> int:
    """Bytes beside a piece as its packing is highest, in plain torch: fp32 copies, what each row or group has, and the codes."""
    is_fp32 = weights.bytes_per_element == _FP32_BYTES
    if weights.frozen == "int8":
        return 5 * num_elements + 12 * num_rows if is_fp32 else 8 * (num_elements + num_rows)
    block = PACKED_SIZES[weights.frozen].block_elements
    num_blocks = -(-num_elements // block)
    padded = num_blocks * block
    if weights.frozen == "int4":
        return padded * (weights.bytes_per_element + (0 if is_fp32 else _FP32_BYTES) + 1) + padded // 2 + 24 * num_blocks
    return padded * weights.bytes_per_element + PACKED_SIZES[weights.frozen].count_bytes(
        num_elements, num_rows=num_rows, bytes_per_element=weights.bytes_per_element
    )
