"""Kinds of time: what a step's milliseconds are spent on, and of which kind an op is. Torch-free.

Finer than lanes: a lane says what can be busy at once, a kind says what is being done, so that each kind can have its own
rate, be shown by itself and be corrected by what finished runs took.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args

from optimizer.formats.op_costs import OpKind

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
"""On the compute lane. ``half_precision`` is products and attention in 16 bits: another unit of the processor, or none, does
them, so that what is learnt of fp32 says nothing of them. ``dispatch`` is what ops cost beside their kernels; ``hooks`` is the
techniques' own Python: entering a block again, packing and unpacking what goes away."""
COMPUTE_KINDS: tuple[ComputeKind, ...] = get_args(ComputeKind)
KINDS: tuple[str, ...] = (*COMPUTE_KINDS, "allocation", "copy_in", "copy_out", "host", "disk", "network")
"""All of them; ``allocation`` is memory touched for the first time, the rest are the other lanes (``prediction.Lane``)."""

_REDUCTIONS = ("softmax", "norm", "sum", "mean", "var", "amax", "max", "logsumexp", "argmax", "cumsum", "topk", "sort")
_GATHERS = ("embedding", "index", "gather", "scatter", "nll_loss", "select_backward", "slice_backward", "one_hot", "histc")


PRODUCTS: tuple[ComputeKind, ...] = ("matmul", "attention", "half_precision")
"""Kinds whose work is counted in FLOPs; that of the others in bytes."""


_EARLIER_NAMES = {"matmul_16": "half_precision"}
"""Of kinds, in predictions and calibrations that were stored under them."""


def by_present_names(by_kind: Mapping[str, float]) -> dict[str, float]:
    """Stored times or factors by the names that kinds have now; what has none stays as it is."""
    return {_EARLIER_NAMES.get(kind, kind): value for kind, value in by_kind.items()}


@cache
def kind_of(op_kind: OpKind, name: str) -> ComputeKind:
    """Of an op on the compute lane, from its kind in the profile and its name (``aten.tanh.default``)."""
    if op_kind == "matmul" or op_kind == "attention":
        return op_kind
    if not name.startswith("aten."):
        return "quantization" if name.startswith("bitsandbytes.") else "elementwise"
    base = base_name(name)
    if any(part in base for part in _GATHERS):
        return "gather"
    return "reduction" if any(part in base for part in _REDUCTIONS) else "elementwise"


@cache
def base_name(name: str) -> str:
    """``tanh`` of ``aten.tanh.default``; what has no namespace and overload stays."""
    return name.split(".")[1] if name.count(".") >= 2 else name

