"""Bytes that saving, merging and exporting hold on the host for a moment, and write. Torch-free.

A checkpoint is written a piece at a time (``models/files/tensor_files.py``). Exported, a tensor is whole for a moment where
it has to be made: unpacked, or with its adapter added in fp32 (``runtime/job/export/export_weights.py``); the files are
compared a piece at a time.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from optimizer.estimate.categories.stores import STORE_LANES
from optimizer.estimate.categories.tensors import TensorList, list_tensors
from optimizer.estimate.categories.weights import packed_bytes
from optimizer.estimate.memo import Table
from optimizer.estimate.tasks.moments import moments_of
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.plan.weights import DTYPE_BYTES
from optimizer.profile.profile import Profile
from optimizer.profile.trained import BaseSize, BaseSizes, TensorSize
from optimizer.workload import TrainingWorkload

NUM_KEPT = 3
"""Checkpoints that stay beside the one that is being written (``runtime/job/checkpoint.py``)."""
_FP32_BYTES = 4
_ENTRY_BYTES = 140
"""In a header, for each tensor."""
_RANDOM_BYTES = 6 * 1024
"""The random state, facts and the manifest."""
_Q8_BYTES_PER_BLOCK, _Q8_BLOCK_ELEMENTS = 34, 32
_WHOLE: Final[Table[None, tuple[int, tuple[BaseSize, ...]]]] = Table()
"""A model's elements, and the distinct sizes of its tensors."""


@dataclass(frozen=True, kw_only=True)
class FilesHeld:
    """One stage's bytes beside what is there all the while."""

    host_bytes: int
    """On the host, for a moment."""
    disk_bytes: int
    """In files, once it has ended or at its most."""


def estimate_save(tensors: TensorList, *, plan: Plan, workload: TrainingWorkload) -> FilesHeld:
    """The last checkpoint but one that is written beside those that are kept."""
    checkpoint_bytes = estimate_checkpoint_bytes(tensors, plan=plan, workload=workload)
    largest = max(tensors.num_elements, default=0)
    keeps_fp32 = workload.num_moments > 0 or plan.weights.master_bytes_per_element > 0
    element_bytes = _FP32_BYTES if keeps_fp32 else plan.weights.bytes_per_element
    num_written = workload.num_steps // workload.checkpoint_every_steps if workload.checkpoint_every_steps else 0
    read_bytes = largest * _FP32_BYTES if plan.optimizer_state.place in STORE_LANES else 0
    joined = (_joined(size.num_elements * element_bytes, size, piece_bytes=element_bytes) for size in tensors.sizes)
    return FilesHeld(
        host_bytes=max(read_bytes + min(largest, PIECE_ELEMENTS) * element_bytes, *joined, 0),
        disk_bytes=checkpoint_bytes * min(max(num_written, 1), NUM_KEPT + 1),
    )


def estimate_checkpoint_bytes(tensors: TensorList, *, plan: Plan, workload: TrainingWorkload) -> int:
    """Trained weights, their masters and moments, with headers and random states as they usually are; of ranks that take steps
    alone also the moments of the others, and the outer step's momentum.
    """
    moments = moments_of(tensors.sizes, bits=plan.optimizer_state.bits, kept=workload.kept_state)
    state_bytes = sum(moments.num_bytes(size.num_elements) for size in tensors.sizes)
    num_entries = len(tensors.sizes) * (2 + workload.num_moments + bool(plan.weights.master_bytes_per_element))
    weight_bytes = tensors.total_elements * (plan.weights.bytes_per_element + plan.weights.master_bytes_per_element)
    if plan.layout.steps_alone:
        others = plan.layout.num_devices - 1
        has_momentum = plan.layout.sync_rule == "nesterov"
        state_bytes += others * state_bytes + has_momentum * _FP32_BYTES * tensors.total_elements
        num_entries += len(tensors.sizes) * (has_momentum + others * (1 + workload.num_moments))
        if not plan.weights.master_bytes_per_element and plan.weights.bytes_per_element < _FP32_BYTES:
            # Common weights, which are finer than the model's.
            state_bytes += _FP32_BYTES * tensors.total_elements
    return weight_bytes + state_bytes + num_entries * _ENTRY_BYTES + _RANDOM_BYTES


def kept_checkpoint_bytes(tensors: TensorList, *, plan: Plan, workload: TrainingWorkload, num_steps: int) -> int:
    """Bytes of the checkpoints that lie there after so many steps."""
    num_written = num_steps // workload.checkpoint_every_steps if workload.checkpoint_every_steps else 0
    return min(num_written, NUM_KEPT) * estimate_checkpoint_bytes(tensors, plan=plan, workload=workload)


def estimate_export(
    profile: Profile, tensors: TensorList, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> dict[str, FilesHeld]:
    """By stage, ``merge`` and ``export``, as far as the workload has them; empty where a profile does not know the tensors."""
    base = profile.base
    if base is None:
        return {}
    export, adapts = workload.export, workload.adapter is not None
    element_bytes = plan.weights.bytes_per_element if export.dtype == "same" else DTYPE_BYTES[export.dtype]
    num_elements, sizes = _WHOLE.obtain(list_tensors(profile), None, lambda: _whole_sizes(base, profile.tensors.block_kinds))
    # Of a GGUF file two pieces are there at once: the one that is converted and the one before.
    piece_bytes = 2 * _FP32_BYTES if export.gguf != "none" else element_bytes
    held = partial(_held, plan=plan, adapts=adapts, piece_bytes=piece_bytes, on_cuda=machine.device.kind == "cuda")
    made_bytes = max(map(held, sizes))
    whole_bytes = num_elements * element_bytes
    gguf_bytes = _gguf_bytes(num_elements, export.gguf)
    if not adapts:
        return {"export": FilesHeld(host_bytes=made_bytes, disk_bytes=whole_bytes + gguf_bytes)}
    merges = export.adapter in ("merged", "both")
    alone_bytes = tensors.total_elements * element_bytes if export.adapter in ("alone", "both") else 0
    merged_bytes = (whole_bytes if merges else 0) + gguf_bytes
    stages: dict[str, FilesHeld] = {}
    if merged_bytes:
        stages["merge"] = FilesHeld(host_bytes=made_bytes, disk_bytes=merged_bytes + alone_bytes)
    if alone_bytes:
        compared = [size for size in sizes if merges and size.adapts]
        alone_held = max((_compared(size, plan, element_bytes=element_bytes) for size in compared), default=0)
        alone_held = max(alone_held, min(max(tensors.num_elements), PIECE_ELEMENTS) * element_bytes)
        stages["export"] = FilesHeld(host_bytes=alone_held, disk_bytes=alone_bytes + (whole_bytes if merges else 0))
    return stages


def _held(size: BaseSize, plan: Plan, *, adapts: bool, piece_bytes: int, on_cuda: bool) -> int:
    """Host bytes of one tensor while it is made and written, at the most."""
    value = size.num_elements * plan.weights.bytes_per_element
    packs = adapts and size.packs and plan.weights.frozen != "same"
    is_copied = (on_cuda and plan.weights.place == "device") or plan.weights.place in STORE_LANES
    source = (packed_bytes(size, plan.weights) if packs else value) if is_copied else 0
    if not adapts and plan.optimizer_state.place in STORE_LANES:
        source = size.num_elements * _FP32_BYTES
    made = source + (value if packs else 0)
    kept = value if packs else source
    if adapts and size.adapts:
        made, kept = made + size.num_elements * _FP32_BYTES, size.num_elements * _FP32_BYTES
    joined = _joined(value, size, piece_bytes=piece_bytes) + (size.num_elements * _FP32_BYTES if adapts and size.adapts else 0)
    return max(made, kept + min(size.num_elements, PIECE_ELEMENTS) * piece_bytes, joined if size.num_parts > 1 else 0)


def _whole_sizes(base: BaseSizes, block_kinds: tuple[int, ...]) -> tuple[int, tuple[BaseSize, ...]]:
    """Elements of the model's tensors, of which ranks may have a part each, and the distinct sizes of whole tensors."""
    counts = Counter(size for _, size in base.in_order(block_kinds))
    whole = {replace(size, num_elements=size.num_elements * size.num_parts): count for size, count in counts.items()}
    return sum(size.num_elements * count for size, count in whole.items()), tuple(whole)


def _joined(whole_bytes: int, size: BaseSize | TensorSize, *, piece_bytes: int) -> int:
    """Host bytes while a tensor of which ranks have a part each is joined, beside the parts that came, and then written; 0 of one
    that all have. size: of the whole.
    """
    if size.num_parts == 1:
        return 0
    came_bytes = whole_bytes - whole_bytes // size.num_parts
    return whole_bytes + max(came_bytes, min(size.num_elements, PIECE_ELEMENTS) * piece_bytes)


def _compared(size: BaseSize, plan: Plan, *, element_bytes: int) -> int:
    """Host bytes while a merged matrix is compared with what its saved adapter adds."""
    packs = size.packs and plan.weights.frozen != "same"
    beside = max(plan.weights.bytes_per_element if packs else 0, element_bytes)
    return size.num_elements * (_FP32_BYTES + beside)


def _gguf_bytes(num_elements: int, packing: str) -> int:
    if packing == "none":
        return 0
    if packing == "f16":
        return 2 * num_elements
    return num_elements // _Q8_BLOCK_ELEMENTS * _Q8_BYTES_PER_BLOCK
