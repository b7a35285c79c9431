"""What CUDA's kernels hold beside the tensors that the trace shows, from the sizes that it shows. Torch-free.

Most ops allocate the same as on the CPU, by whose kernels profiles are traced. Those known to differ, with the file that says so:

attention, forward     the log-sum-exp as on the CPU; the memory-efficient kernel rounds rows up to 32 (torch, attention.cu).
attention, backward    in 16 bits sums of the query's gradient in fp32 and a number for each row; with fewer key heads also the
                       keys' and values' gradients for every query head (flash-attention 2, flash_api.cpp, mha_bwd). In fp32
                       a number for each row; that kernel adds up in its result (torch, attention_backward.cu).
embedding, backward    above 3,072 tokens ids sorted with their places, twice, and the sort's own (torch,
                       EmbeddingBackwardKernel.cu).
dropout                a mask of a byte an element, as on the CPU; attention's is a seed and an offset (torch, Dropout.cu).
layer norm, backward   partial sums, under a MiB at usual widths: not counted (torch, layer_norm_kernel.cu).
fused AdamW, norms     pointers, under a MiB: not counted (torch, MultiTensorApply.cuh).

*Not modelled*: more than one split of the deterministic sums, which small batches of few heads get on large cards; matrix
products that ask cublasLt for more than its workspace; bitsandbytes.
"""

from collections.abc import Sequence

_ATTENTION_BACKWARD = "scaled_dot_product"
_EMBEDDING_BACKWARD = "embedding_dense_backward"
_FP32_BYTES = 4
_ID_BYTES = 8
_NUM_ID_BUFFERS = 5
_MIN_SORTED_TOKENS = 3072
_HEAD_DIM = 64
"""Assumed where a size is one fp32 number for each head and token: smaller heads have more rows."""


def scratch_bytes(op_name: str, results: Sequence[int], *, element_bytes: int, num_tokens: int) -> int:
    """Held while one op runs. results: bytes of what it returns, in order. element_bytes: of what it computes in."""
    if "backward" not in op_name:
        return 0
    if _ATTENTION_BACKWARD in op_name and results:
        return _attention_backward_bytes(results, element_bytes)
    if _EMBEDDING_BACKWARD in op_name and num_tokens > _MIN_SORTED_TOKENS:
        return _NUM_ID_BUFFERS * _ID_BYTES * num_tokens
    return 0


def _attention_backward_bytes(results: Sequence[int], element_bytes: int) -> int:
    query_bytes, rest = results[0], results[1:3]
    num_elements = query_bytes // element_bytes
    rows_bytes = _FP32_BYTES * num_elements // _HEAD_DIM
    if element_bytes >= _FP32_BYTES:
        return rows_bytes
    expanded = sum(query_bytes for num_bytes in rest if num_bytes < query_bytes)
    return _FP32_BYTES * num_elements + rows_bytes + expanded
