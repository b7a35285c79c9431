"""Memory that CUDA's kernels hold that add up by index, and that sort. Torch-free.

Sources, of torch 2.11 to 2.13: ``EmbeddingBackwardKernel.cu``, ``Indexing.cu``, ``TensorAdvancedIndexing.cpp``, ``Sort.cpp``,
``SortStable.cu``; cub's ``dispatch_radix_sort.cuh``, of which what it allocates is a bound. In the runtime's deterministic
mode, sums by index sort the indices. Where a profile carries no count of indices, the most that its bytes allow is the upper end.
"""

from optimizer.base.intervals import ByteInterval
from optimizer.base.units import MIB
from optimizer.estimate.kernels.held import NOTHING, Held, OpCall, hold_while_running, interval_of

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32_BYTES, _ID_BYTES = 4, 8
_MIN_SORTED_TOKENS = 3_072
_ROWS_PER_PART = 10
_SORTED_BYTES = 3 * _ID_BYTES
"""Bytes of an index that is sorted with its place."""
_MOST_AXES = 2
"""Most axes of a scatter whose indices are expanded."""
_SORT_GUARD_BYTES = 2 * MIB


def hold_embedding_backward(call: OpCall, *, num_tokens: int) -> Held:
    """fp32 sums of parts of rows, with the places that they begin at; before them, tokens sorted with their places."""
    size = _ELEMENT_BYTES.get(call.dtype, _FP32_BYTES)
    num_tokens = min(num_tokens, call.read_bytes // (_ID_BYTES + size))
    if num_tokens <= _MIN_SORTED_TOKENS:
        return NOTHING
    width = max(1, (call.read_bytes // num_tokens - _ID_BYTES) // size)
    num_rows = min(num_tokens, call.written_bytes // (width * size))
    num_parts = num_tokens // _ROWS_PER_PART + num_rows
    sums_bytes = _FP32_BYTES * width * num_parts + _ID_BYTES * (3 * num_tokens + 2 * num_rows + num_parts) + 16
    sort = hold_sort_of_pairs(num_tokens, _ID_BYTES)
    first_bytes = [_SORTED_BYTES * num_tokens + each for each in (sort.low, sort.high)]
    held = [max(sums_bytes, each) for each in first_bytes]
    return hold_while_running(ByteInterval(low=held[0], value=held[0], high=held[1]), "EmbeddingBackwardKernel.cu")


def hold_sort_of_pairs(count: int, key_bytes: int) -> ByteInterval:
    """Bytes that cub asks for to sort keys with places of 8 bytes."""
    least = (key_bytes + _ID_BYTES) * count
    return ByteInterval(low=least, value=least, high=least + _SORT_GUARD_BYTES + count // 8)


def hold_index_put(call: OpCall, *, num_tokens: int) -> Held:
    """Linear indices, sorted with their places."""
    size = _ELEMENT_BYTES.get(call.dtype, _FP32_BYTES)
    most = max(0, call.read_bytes) // (_ID_BYTES + size)
    return hold_while_running(_sorted(min(1, most), min(num_tokens, most), most), "Indexing.cu, index_put_with_sort_kernel")


def hold_index_add(call: OpCall, *, num_tokens: int) -> Held:
    """The source once more, scaled, beside the sorted rows."""
    size = _ELEMENT_BYTES.get(call.dtype, _FP32_BYTES)
    added_bytes = max(0, call.read_bytes - call.written_bytes)
    most = added_bytes // (_ID_BYTES + size)
    source_bytes = max(0, added_bytes - _ID_BYTES * min(num_tokens, most))
    rows = _sorted(min(1, most), min(num_tokens, most), most)
    low = max(0, added_bytes - _ID_BYTES * most) + rows.low
    held = interval_of(low, added_bytes + rows.high, likely=source_bytes + rows.value)
    return hold_while_running(held, "Indexing.cu, index_add_cuda_impl")


def hold_scatter_add(call: OpCall) -> Held:
    """Memory of a scatter through a sorted sum, with indices of every axis in either form of the sources."""
    size = _ELEMENT_BYTES.get(call.dtype, _FP32_BYTES)
    count = max(0, call.read_bytes - call.written_bytes) // (_ID_BYTES + size)
    least, most = 48 * count, (64 + _ID_BYTES * _MOST_AXES) * count + _SORT_GUARD_BYTES * (count > 0)
    return hold_while_running(ByteInterval(low=least, value=least, high=most), "TensorAdvancedIndexing.cpp")


def hold_sort(call: OpCall) -> Held:
    """A row's places at least; at most lists of segments, keys once more and cub's second buffers."""
    size = _ELEMENT_BYTES.get(call.dtype, _FP32_BYTES)
    count = call.written_bytes // (size + _ID_BYTES)
    most = (24 + 2 * size) * count + _SORT_GUARD_BYTES * (count > 0)
    return hold_while_running(ByteInterval(low=0, value=(16 + size) * count, high=most), "Sort.cpp, SortStable.cu")


def _sorted(least: int, likely: int, most: int) -> ByteInterval:
    """Bytes of sorted indices, by how many there are."""
    each_bytes = _ID_BYTES + _SORTED_BYTES + 2 * _ID_BYTES
    forming_bytes = 2 * _ID_BYTES
    most_bytes = (each_bytes + forming_bytes) * most + _SORT_GUARD_BYTES + most // 8 if most else 0
    return ByteInterval(low=each_bytes * least, value=each_bytes * likely, high=most_bytes)
