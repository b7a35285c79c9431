"""CUDA's side of the seam: which formula or row of the table is an op's. Torch-free.

Profiles are traced by the CPU's kernels, and most ops allocate the same on a card. Those known to differ are here, in
``cuda_attention.py`` and ``cuda_indexing.py``, from the sources of torch 2.11 to 2.13; what holds nothing is in ``cuda_rows.py``.

*Not modelled*: bitsandbytes; ``_grouped_mm``; attention that the CPU spells out and a card fuses, or the other way round.
"""

from collections.abc import Sequence

from optimizer.base.intervals import ByteInterval, exact_interval
from optimizer.estimate.kernels.cuda_attention import hold_attention
from optimizer.estimate.kernels.cuda_indexing import (
    hold_embedding_backward,
    hold_index_add,
    hold_index_put,
    hold_scatter_add,
    hold_sort,
)
from optimizer.estimate.kernels.cuda_rows import find_row
from optimizer.estimate.kernels.held import NO_BYTES, NOTHING, Held, OpCall, hold_while_running
from optimizer.formats.op_costs import base_name
from optimizer.hardware.device_spec import Card
from optimizer.profile.ops import Op
from optimizer.profile.sizes import Shape, evaluate

_ATTENTION = "_scaled_dot_product"
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_CHUNK_ELEMENTS = 65_536
"""Elements of a tensor that one block of a kernel over many tensors works on."""
_FP32_BYTES = 4
_ALLOCATED_BYTES = 512
"""The least that the allocator gives."""
_MANY_ROWS = 65_536
_ROWS_AT_ONCE = 32
_MOST_PARTS = 32_768


class CudaKernels:
    """Memory that a card's kernels hold."""

    random_state_bytes = 0
    """A card's is a seed and an offset, on the host."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def hold(self, op: Op, shape: Shape, *, compute_dtype: str) -> Held:
        """Memory that one op holds. compute_dtype: a profile has fp16 as bf16, so that the plan decides."""
        call = call_of(op, shape, compute_dtype=compute_dtype)
        return self.hold_call(call, num_tokens=shape[0] * shape[1], is_kept=False)

    def hold_call(self, call: OpCall, *, num_tokens: int, is_kept: bool) -> Held:
        """Memory that one call holds. num_tokens: of a micro-batch, the most indices that embeddings have. is_kept:
        what forward saves stays.
        """
        base = base_name(call.name)
        if base.startswith(_ATTENTION):
            return hold_attention(call, self._card, is_kept=is_kept)
        if base == "embedding_dense_backward":
            return hold_embedding_backward(call, num_tokens=num_tokens)
        if base in ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"):
            return hold_index_put(call, num_tokens=num_tokens)
        if base in ("index_add", "index_add_"):
            return hold_index_add(call, num_tokens=num_tokens)
        if base in ("scatter_add", "scatter_add_"):
            return hold_scatter_add(call)
        if base in ("sort", "topk"):
            return hold_sort(call)
        if base in ("native_layer_norm_backward", "_fused_rms_norm_backward"):
            return self._hold_norm_backward(call, num_shares=2 if "layer" in base else 1, num_tokens=num_tokens)
        row = find_row(base)
        return NOTHING if row is None else Held(NO_BYTES, NO_BYTES, row.certainty, row.source)

    def hold_norms(self, num_elements: Sequence[int]) -> Held:
        """``_foreach_norm`` of tensors of so many elements: a number for each chunk of the largest, and each tensor's result."""
        if not num_elements:
            return NOTHING
        most_chunks = -(-max(num_elements) // _CHUNK_ELEMENTS)
        count = len(num_elements)
        num_bytes = _FP32_BYTES * count * most_chunks + _ALLOCATED_BYTES * count
        return hold_while_running(exact_interval(num_bytes), "ForeachReduceOp.cu, foreach_tensor_norm_cuda")

    def _hold_norm_backward(self, call: OpCall, *, num_shares: int, num_tokens: int) -> Held:
        """Sums over parts of very many narrow rows. The rows are at most the tokens; their width follows from the bytes."""
        size = _ELEMENT_BYTES.get(call.dtype, _FP32_BYTES)
        width = call.written_bytes // (size * max(1, num_tokens))
        _, _, most = self._card.multiprocessors
        if num_tokens <= _MANY_ROWS or not width or -(-width // _ROWS_AT_ONCE) >= most / 2:
            return NOTHING
        num_parts = min(_MOST_PARTS // -(-width // _ROWS_AT_ONCE), -(-num_tokens // _ROWS_AT_ONCE))
        num_bytes = num_shares * size * width * num_parts
        return hold_while_running(ByteInterval(low=0, value=num_bytes, high=num_bytes), "layer_norm_kernel.cu")


def holds_without_change(op: Op) -> bool:
    """True where a kernel that writes in place, so that no bytes come or go with it, may hold scratch."""
    return base_name(op.name).startswith(("index_", "_index_", "scatter_", "convolution"))


def call_of(op: Op, shape: Shape, *, compute_dtype: str) -> OpCall:
    """The op at one shape, in the dtype that the plan computes in."""
    return OpCall(
        name=op.name,
        dtype="fp16" if op.dtype == "bf16" and compute_dtype == "fp16" else op.dtype,
        form=op.form,
        sides=tuple(evaluate(side, shape) for side in op.sides),
        read_bytes=evaluate(op.read_bytes, shape),
        written_bytes=evaluate(op.written_bytes, shape),
    )
