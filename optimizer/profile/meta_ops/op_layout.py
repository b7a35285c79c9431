"""Facts that decide which kernel an op runs beside its name: the dtype of its numbers, and how a product's operands lie in
memory.

A CPU without instructions for a dtype multiplies it ten times faster in one form than in another, and autocast leaves some
products as they were, so neither can be read from the op's name or from the plan.
"""

from collections.abc import Sequence

import torch

from optimizer.formats.op_costs import ADDING, WHOLE, base_name, classify_op

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}


def dtype_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """Dtype of the first floats it reads; else of the floats it writes, unless it reads packed numbers. Empty where there
    are none.
    """
    for tensor in inputs:
        if tensor.dtype.is_floating_point:
            return DTYPE_NAMES.get(tensor.dtype, "")
    if inputs and inputs[0].dtype in DTYPE_NAMES:
        return DTYPE_NAMES[inputs[0].dtype]
    return next((DTYPE_NAMES.get(tensor.dtype, "") for tensor in outputs if tensor.dtype.is_floating_point), "")


def form_of(name: str, inputs: Sequence[torch.Tensor], *, is_causal: bool = False) -> str:
    """``nt`` of ``x @ weight.t()``, WHOLE of attention that is not causal. inputs: in the order of the schema."""
    kind = classify_op(name)
    if kind == "attention":
        return "" if is_causal else WHOLE
    if kind != "matmul":
        return ""
    first = 1 if base_name(name) in ADDING else 0
    return "".join("t" if _is_transposed(tensor) else "n" for tensor in inputs[first : first + 2])


def _is_transposed(matrix: torch.Tensor) -> bool:
    """A single row or column lies either way; it is then taken as it is."""
    return matrix.stride(-2) == 1 and matrix.stride(-1) != 1 and matrix.shape[-2] > 1
