"""Carries out the allocator row of a plan, and tidies up between the phases of a run, never in a step."""

import gc
import os

import torch

from optimizer.base.heap import give_freed_memory_back, keep_freed_memory
from optimizer.plan.allocator import AllocatorPlan
from optimizer.runtime.device.backends import backend_of

_SETTINGS = "PYTORCH_ALLOC_CONF"
_OLDER_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
"""Read by torch before 2.10, and still."""


def apply_allocator(plan: AllocatorPlan, device: torch.device) -> None:
    """Set the CUDA caching allocator as planned, whether or not it is in use already; on the CPU device have the C library keep
    what is freed. What the user has set stands.

    Segments that exist keep their kind; call it before anything was allocated where that matters.
    """
    if device.type == "cpu":
        keep_freed_memory()
    memory = backend_of(device).memory
    if memory is not None and _SETTINGS not in os.environ and _OLDER_SETTINGS not in os.environ:
        memory.set_expandable_segments(is_on=plan.expandable_segments)


def release_unused(device: torch.device) -> None:
    """Collect garbage and give cached blocks back: after loading and after evaluation, whose tensors have other sizes.

    Objects that live as long as the run are then left out of later collections, which else walk the whole model.
    """
    gc.collect()
    gc.freeze()
    give_freed_memory_back()
    memory = backend_of(device).memory
    if memory is not None:
        memory.release_cached()
