"""Rates of compressing what is offloaded and of undoing that, as the runtime does: in chunks."""

from collections.abc import Callable

import torch

from optimizer.formats.transfer_sizes import chunk_elements
from optimizer.hardware.curves import Curve, PackedForm, PackingWay, packing_curve_name
from optimizer.hardware.probe.clock import TimeShare, as_curve, quartile_s, random_tensor
from optimizer.plan.activations import Compression
from optimizer.runtime.tiers.compression import Packing, Scratch

COMPRESSIONS: tuple[PackedForm, ...] = ("bf16", "int8")
_CHUNKS = (1 / 16, 1, 4)
"""Sizes of a storage, in chunks."""


def probe_packing(device: torch.device, *, max_s: float) -> dict[str, Curve]:
    """Elements per second by the number of elements, under ``pack int8``, ``unpack bf16`` and the like, the copy left out."""
    share = TimeShare(max_s)
    cases = [(compress, chunks) for compress in COMPRESSIONS for chunks in _CHUNKS]
    points: dict[str, list[tuple[float, float]]] = {}
    for done, (compress, chunks) in enumerate(cases):
        num_elements = int(chunks * chunk_elements(device.type))
        max_each_s = share.part_s(4 * (len(cases) - done))
        for way, (run, copy) in _trips(num_elements, compress, device).items():
            whole_s, copy_s = (quartile_s(timed, device, max_s=max_each_s) for timed in (run, copy))
            rate = num_elements / max(whole_s - copy_s, whole_s / 20)
            points.setdefault(packing_curve_name(way, compress), []).append((num_elements, rate))
    return {name: as_curve(found) for name, found in points.items()}


def _trips(
    num_elements: int, compress: Compression, device: torch.device
) -> dict[PackingWay, tuple[Callable[[], object], Callable[[], object]]]:
    """The trips by way, and the copy in each alone."""
    values = random_tensor((num_elements,), device, torch.float32).view(torch.uint8)
    packing = Packing(values.nbytes, dtype=torch.float32, compress=compress, scratch=Scratch(compress, device=device))
    pieces = [torch.zeros(packing.packed_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")]
    bare = Packing(packing.packed_bytes, dtype=torch.uint8)
    packed = torch.zeros(packing.packed_bytes, dtype=torch.uint8, device=device)
    return {
        "pack": (lambda: packing.pack(values, pieces), lambda: bare.pack(packed, pieces)),
        "unpack": (lambda: packing.unpack(pieces, values), lambda: bare.unpack(pieces, packed)),
    }
