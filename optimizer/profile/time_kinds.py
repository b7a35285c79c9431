"""Kinds of time: what a step's milliseconds are spent on. Torch-free.

Finer than lanes: a lane says what can be busy at once, a kind says what is being done, so that each kind can have its own
rate, be shown by itself and be corrected by what finished runs took.
"""

from collections.abc import Mapping
from typing import Literal, get_args

ComputeKind = Literal[
    "matmul",
    "attention",
    "half_precision",
    "elementwise",
    "reduction",
    "gather",
    "quantization",
    "dispatch",
    "hooks",
    "optimizer",
]
"""Kinds of time on the compute lane. ``half_precision`` is products and attention in 16 bits: another unit of the
processor, or none, does them, so that what is learnt of fp32 says nothing of them. ``dispatch`` is what ops cost beside
their kernels; ``hooks`` is the techniques' own Python: entering a block again, packing and unpacking what goes away."""
COMPUTE_KINDS: tuple[ComputeKind, ...] = get_args(ComputeKind)
TimeKind = Literal[ComputeKind, "allocation", "copy_in", "copy_out", "host", "disk", "network"]
"""All kinds; ``allocation`` is memory touched for the first time, the rest are the other lanes (``categories.Lane``)."""
KINDS: tuple[TimeKind, ...] = get_args(TimeKind)
PRODUCTS: tuple[ComputeKind, ...] = ("matmul", "attention", "half_precision")
"""Kinds whose work is counted in FLOPs; that of the others in bytes."""
_EARLIER_NAMES = {"matmul_16": "half_precision"}
"""Earlier names of kinds, in predictions and calibrations that were stored under them."""


def by_present_names(by_kind: Mapping[str, float]) -> dict[str, float]:
    """Stored times or factors by the names that kinds have now; what has none stays as it is."""
    return {_EARLIER_NAMES.get(kind, kind): value for kind, value in by_kind.items()}


