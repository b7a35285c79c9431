"""Bytes that offloaded blocks move, where to, and how long that takes: the trace of ``offload`` turned into the other ways of
offloading, and into compressed trips. Torch-free.

A profile holds offloaded blocks once, as they go to the host uncompressed (``traced_choice``). Going elsewhere or compressed
changes nothing on the device but for the packer's buffers, which stay as long as the run (``estimate_packing_bytes``). Where a
store takes the copies, the host holds the staging buffers instead (``estimate_staging_bytes``). Each copy takes what it has
when packed. Nothing else differs, so the bytes equal the runtime's to the byte.

*Not modelled*: the growth of the scratch file in steps, keys and overhead of a remote store, a storage that is saved under two
dtypes (each packed by itself; one where it is not compressed).
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from optimizer.base.categories import Link, Tier
from optimizer.estimate.categories.stores import STORE_LANES, STORE_LINKS, read_ms, write_ms
from optimizer.estimate.ops.op_times import seconds_by_bytes
from optimizer.estimate.tasks.change import Change
from optimizer.formats.op_costs import OpKind
from optimizer.formats.transfer_sizes import FLOAT_BYTES, STAGING_BYTES, chunk_elements, packed_bytes, scratch_bytes
from optimizer.hardware.rates import Rates
from optimizer.plan.activations import ActivationsPlan, BlockChoice, Compression
from optimizer.plan.weights import WeightsPlan

_PLACES: dict[BlockChoice, Tier] = {"offload": "host", "offload_disk": "disk", "offload_remote": "remote"}
PACK_OPS = {"none": 0, "bf16": 1, "int8": 12}
"""Ops on the device for each chunk, beside the copy itself (``runtime/tiers/compression.py``)."""
UNPACK_OPS = {"none": 0, "bf16": 1, "int8": 3}
_PACKED_BYTES = {"bf16": 2, "int8": 1}
_WIDE_BYTES = {"pack": 4 + 8 + 4 + 4 + 8 + 8 + 8 + 4, "unpack": 4 + 8 + 4}
"""Bytes of one element in fp32 on its way to int8 and back: written, made absolute, read for the maximum, written,
divided, clamped, rounded, read for its code; and written, scaled, read."""


@dataclass(frozen=True, kw_only=True)
class Trip:
    """The way on which one block's choice sends its saved tensors away."""

    place: Tier
    compress: Compression

    @property
    def links(self) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
        """Links on the way out, and on the way back."""
        if self.place in STORE_LINKS:
            out, back = STORE_LINKS[self.place]
            return ("device_to_host", out), (back, "host_to_device")
        return ("device_to_host",), ("host_to_device",)


TRACED_TRIP: Final = Trip(place="host", compress="none")
"""The trip that a profile is traced with."""


@dataclass(frozen=True, kw_only=True)
class TracedCopy:
    """A copy between device and host in the trace of ``offload``: one whole storage."""

    is_out: bool
    dtype: str
    """Name of the dtype in torch: ``float32``."""
    num_bytes: int

    def packed(self, compress: Compression) -> int:
        return packed_bytes(self.num_bytes, dtype=self.dtype, compress=compress)


@dataclass(frozen=True, kw_only=True)
class TripTime:
    """Milliseconds on each lane, for one part."""

    compute_ms: float
    """Packing and unpacking."""
    copy_out_ms: float
    copy_in_ms: float
    disk_ms: float
    """Writing or reading; beside the others, as the threads of ``runtime/tiers/transfers.py`` do it, and so is the next."""
    network_ms: float


def trip_of(choice: BlockChoice, compress: Compression) -> Trip | None:
    """The trip of a block's saved tensors; None where they do not leave the device."""
    place = _PLACES.get(choice)
    return None if place is None else Trip(place=place, compress=compress)


def read_copy(kind: OpKind, name: str, num_bytes: int) -> TracedCopy | None:
    """The copy that an op of a traced part makes (``copy.float32``), from the bytes it writes; None for other ops."""
    if kind not in ("copy_out", "copy_in"):
        return None
    return TracedCopy(is_out=kind == "copy_out", dtype=name.rpartition(".")[2], num_bytes=num_bytes)


def redirect_changes(
    changes: Sequence[Change], copies: Sequence[TracedCopy], *, trip: Trip, made: Sequence[TracedCopy] = ()
) -> list[Change]:
    """A traced part's changes as this trip has them: as many, in the same order, so that their places stay.

    copies: of the part. made: of the same block's forward, for what goes in a part that did not fetch it.
    """
    sizes = _PackedSizes(copies, made, trip.compress)
    redirected: list[Change] = []
    for tier, slot, num_bytes in changes:
        if tier == "host":
            packed = sizes.next_of(abs(num_bytes))
            redirected.append((trip.place, slot, packed if num_bytes > 0 else -packed))
        else:
            redirected.append((tier, slot, num_bytes))
    return redirected


def count_copied_bytes(copies: Iterable[TracedCopy], *, trip: Trip) -> dict[Link, int]:
    """Bytes by link that the runtime counts for a part with these copies."""
    counted: dict[Link, int] = {}
    out, back = trip.links
    for copy in copies:
        for link in out if copy.is_out else back:
            counted[link] = counted.get(link, 0) + copy.packed(trip.compress)
    return counted


def estimate_trip_ms(copies: Sequence[TracedCopy], *, trip: Trip, rates: Rates, device_kind: str) -> TripTime:
    """Time of a part's copies on this trip, in place of those that the trace shows."""
    packed = [copy.packed(trip.compress) for copy in copies]
    out_bytes = sum(num_bytes for copy, num_bytes in zip(copies, packed, strict=True) if copy.is_out)
    in_bytes = sum(packed) - out_bytes
    num_out = sum(copy.is_out for copy in copies)
    # Where an op's dispatch was measured, that of the copies is counted with the part's other ops.
    overhead_s = rates.op_overhead_s if rates.forward_dispatch_s is None else 0.0
    num_in = len(copies) - num_out
    out_s = out_bytes / rates.device_to_host_bytes_per_s + num_out * overhead_s * rates.time_factor("copy_out")
    in_s = in_bytes / rates.host_to_device_bytes_per_s + num_in * overhead_s * rates.time_factor("copy_in")
    compute_s = 0.0
    if trip.compress != "none":
        compute_s = sum(_packing_s(copy, trip.compress, rates, device_kind) for copy in copies)
    stored_ms = write_ms(out_bytes, rates, place=trip.place) + read_ms(in_bytes, rates, place=trip.place)
    return TripTime(
        compute_ms=compute_s * 1000,
        copy_out_ms=out_s * 1000,
        copy_in_ms=in_s * 1000,
        disk_ms=stored_ms if trip.place == "disk" else 0.0,
        network_ms=stored_ms if trip.place == "remote" else 0.0,
    )


def estimate_packing_bytes(plan: ActivationsPlan, *, device_kind: str) -> int:
    """Temporaries on the device, as long as the run: what packing needs where something is packed."""
    return scratch_bytes(plan.compress, device_kind=device_kind) if plan.num_offloaded else 0


def estimate_staging_bytes(activations: ActivationsPlan, weights: WeightsPlan) -> int:
    """Bytes on the host, as long as the run, where bytes go between the device and a store; one staging area serves all
    that do.
    """
    uses_store = activations.count("offload_disk", "offload_remote") > 0 or weights.place in STORE_LANES
    return STAGING_BYTES if uses_store else 0


class _PackedSizes:
    """Sizes of packed storages by their bytes.

    Two storages of one size may pack differently (fp32 and int64). They come in the order of the copies, and go in another; which
    of two goes first shows in no peak, since within a block's backward nothing comes.
    """

    def __init__(self, copies: Sequence[TracedCopy], made: Sequence[TracedCopy], compress: Compression) -> None:
        self._waiting: dict[int, deque[int]] = defaultdict(deque)
        self._last: dict[int, int] = {}
        for copy in made:
            self._last.setdefault(copy.num_bytes, copy.packed(compress))
        for copy in copies:
            self._waiting[copy.num_bytes].append(copy.packed(compress))

    def next_of(self, num_bytes: int) -> int:
        if self._waiting[num_bytes]:
            self._last[num_bytes] = self._waiting[num_bytes].popleft()
        return self._last.get(num_bytes, num_bytes)


def _packing_s(copy: TracedCopy, compress: Compression, rates: Rates, device_kind: str) -> float:
    if compress == "none" or copy.packed(compress) == copy.num_bytes:
        return 0.0
    size = FLOAT_BYTES[copy.dtype]
    num_elements = copy.num_bytes // size
    curve = rates.packing_curve("pack" if copy.is_out else "unpack", compress)
    if curve is not None:
        return float(seconds_by_bytes(np.array([num_elements], dtype=np.float64), curve)[0])
    num_chunks = -(-num_elements // chunk_elements(device_kind))
    element_bytes = size + _PACKED_BYTES[compress]
    if compress == "int8":
        element_bytes += _WIDE_BYTES["pack" if copy.is_out else "unpack"]
    num_ops = (PACK_OPS if copy.is_out else UNPACK_OPS)[compress]
    return num_elements * element_bytes / rates.memory_bytes_per_s + num_chunks * num_ops * rates.op_overhead_s
