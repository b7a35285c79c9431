"""The ops of a profile and the runs of them: what was called, how large it is, and what comes and goes meanwhile.

Torch-free. A profile holds each distinct op and change once; its parts point to them.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

from optimizer.base.categories import Category, Tier
from optimizer.formats.op_costs import OpKind, base_name
from optimizer.profile.sizes import NO_TERMS, Terms
from optimizer.profile.time_kinds import ComputeKind

EMBEDDING: Final = "embedding"
HEAD: Final = "head"
"""Parts of a generation's forward pass around its blocks."""
_REDUCTIONS = ("softmax", "norm", "sum", "mean", "var", "amax", "max", "logsumexp", "argmax", "cumsum", "topk", "sort")
_GATHERS = ("embedding", "index", "gather", "scatter", "nll_loss", "select_backward", "slice_backward", "one_hot", "histc")


@dataclass(frozen=True, kw_only=True)
class Op:
    """One kernel call. FLOPs count a multiply-add as two; bytes are of tensors read and written, not of storages."""

    name: str
    kind: OpKind
    flops: Terms
    read_bytes: Terms
    written_bytes: Terms
    scratch_bytes: Terms = NO_TERMS
    """Bytes that the CPU's kernel holds beside them while it runs, however many threads there are
    (``meta_ops/op_scratch.py``)."""
    sides: tuple[Terms, ...] = ()
    """Sides of attention and of products that a library may make, as ``op_scratch.Scratch`` has them. Empty for other
    ops."""
    convolution: tuple[Terms, ...] = ()
    """The fields of ``convolution.Convolution``. Empty for other ops."""
    dtype: str = ""
    """Dtype of the numbers it reads: fp32, bf16, fp16, int8, uint8; empty where they are others, or it was not noted."""
    form: str = ""
    """Form of a product: ``n`` or ``t`` for each operand, by whether its rows lie in memory one after another or its
    columns do. Of attention: ``whole`` where it is not causal."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Bytes that come (positive) or go, on one tier under one category."""

    tier: Tier
    category: Category
    num_bytes: Terms


@dataclass(frozen=True, kw_only=True)
class Part:
    """A run of ops with what comes and goes meanwhile, storages of other parts included.

    Ops and changes are indices in the profile's: few are distinct, and blocks, choices and ranges share them.
    """

    ops: tuple[int, ...]
    changes: tuple[int, ...]
    changes_at: tuple[int, ...]
    """Number of the op in this part for each change. Bytes come with the op and go after it; -1 is before the first."""
    num_views: int = 0
    """Ops beside those listed that move no bytes; each costs its dispatch."""
    storages: tuple[int, ...] = ()
    """Storage born in this part that each change is of, by order of birth; -1: one that was there before. Empty in
    profiles that did not note it."""


@cache
def compute_kind(op_kind: OpKind, name: str) -> ComputeKind:
    """Kind of time that an op on the compute lane takes, from its kind in the profile and its name (``aten.tanh.default``)."""
    if op_kind == "matmul" or op_kind == "attention":
        return op_kind
    if not name.startswith("aten."):
        return "quantization" if name.startswith("bitsandbytes.") else "elementwise"
    base = base_name(name)
    if any(part in base for part in _GATHERS):
        return "gather"
    return "reduction" if any(part in base for part in _REDUCTIONS) else "elementwise"
