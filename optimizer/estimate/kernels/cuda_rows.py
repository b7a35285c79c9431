"""CUDA's kernels that hold nothing, or nothing that is known, each with the source that says so. Torch-free.

Data alone: kernels whose bytes need a formula are ``cuda_attention.py``'s, ``cuda_indexing.py``'s and ``cuda_kernels.py``'s.
"""

from functools import cache
from typing import NamedTuple

from optimizer.estimate.kernels.held import Certainty


class Row(NamedTuple):
    """One kind of kernel."""

    begins: str
    """Start of the op's name, without namespace and overload."""
    certainty: Certainty
    source: str


ROWS: tuple[Row, ...] = (
    Row("_log_softmax", "exact", "SoftMax.cu, host_softmax: written into its result, where what it reads lies in one piece"),
    Row("_softmax", "exact", "SoftMax.cu: the same"),
    Row("nll_loss", "bound", "Loss.cu: the weights' sum, 1 KiB at most (not read at a release)"),
    Row("add", "exact", "CUDALoops.cuh, gpu_kernel_impl: other dtypes are converted as they are read"),
    Row("mul", "exact", "CUDALoops.cuh: the same"),
    Row("sub", "exact", "CUDALoops.cuh: the same"),
    Row("div", "exact", "CUDALoops.cuh: the same"),
    Row("where", "exact", "CUDALoops.cuh: the same"),
    Row("gelu_backward", "exact", "CUDALoops.cuh: the same"),
    Row("native_dropout", "bound", "Dropout.cu: a mask of a byte an element, which the trace shows"),
    Row("cumsum", "bound", "cub.cuh: look-back of 100 KiB at most"),
    Row("mm", "bound", "CublasHandlePool.cpp: the workspace of the handle (hardware/cuda_facts.py)"),
    Row("addmm", "bound", "CUDABlas.cpp: cublasLt takes the same workspace from torch 2.12 on"),
    Row("bmm", "bound", "CublasHandlePool.cpp: as for mm"),
    Row("_fused_adam", "exact", "MultiTensorApply.cuh: addresses travel as arguments of the kernel"),
    Row("_foreach_mul_", "exact", "MultiTensorApply.cuh: the same"),
    Row("convolution", "unknown", "cuDNN's heuristic names a workspace for each engine; no source gives a number"),
)
"""Sums, means and norms of few results hold 8 MiB at most (Reduce.cuh); an op that no row names is taken to hold nothing."""


@cache
def find_row(base: str) -> Row | None:
    """The row of the longest beginning. base: an op's name without namespace and overload."""
    return max((row for row in ROWS if base.startswith(row.begins)), key=lambda row: len(row.begins), default=None)
