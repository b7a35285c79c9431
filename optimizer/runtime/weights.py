"""Carries out the weights row of a plan: the torch dtype that weights, gradients and activations have."""

import torch

from optimizer.plan.weights import WeightsPlan

_TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(plan: WeightsPlan) -> torch.dtype:
    """The dtype the model is built in."""
    return _TORCH_DTYPE[plan.dtype]
