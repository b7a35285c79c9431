"""Sizes of a model's tensors as a profile lists them: trained ones by block, frozen ones summed up."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.formats.shared_blocks import is_partial, is_sliced
from optimizer.models.adapters import list_sites
from optimizer.models.anatomy import find_blocks
from optimizer.profile.trained import BaseSize, BaseSizes, FrozenBytes, Tensors, TensorSize
from optimizer.runtime.layers.quantized_linear import list_base_tensors
from optimizer.runtime.step.sparse_gradients import find_sparse


def mark_sparse(model: nn.Module) -> dict[int, int]:
    """Make embeddings with sparse gradients dense ones that ``Recorder`` knows by their mark; returns the elements in a row,
    by the id of the table.
    """
    sparse = {id(parameter): parameter.shape[1] for parameter in find_sparse(model).values()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in sparse:
            module.sparse, module.scale_grad_by_freq = False, True
    return sparse


def list_tensors(
    model: nn.Module,
    instances: Sequence[int],
    *,
    row_elements: Mapping[int, int],
    unused: Collection[int],
    whole: Callable[[], nn.Module],
    num_sharing: int = 1,
) -> Tensors:
    """Trained tensors that several blocks share belong to none of them: they are listed ahead of the blocks.

    model: short; row_elements: of its tables with sparse gradients; unused: ids of those that never have a gradient; whole:
    makes the model in its full depth, which alone has every shared tensor. num_sharing: ranks that
    share each block, of one of which the model is.
    """
    blocks = find_blocks(model)
    owner = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    shared = find_shared(blocks)
    before: list[TensorSize] = []
    outside: dict[int, list[TensorSize]] = {}
    last_met = -1
    by_block: list[list[TensorSize]] = [[] for _ in blocks]
    for name, parameter in model.named_parameters():
        index = owner.get(id(parameter))
        last_met = max(last_met, -1 if index is None else index)
        if not parameter.requires_grad or id(parameter) in shared or id(parameter) in unused:
            continue
        if index is not None:
            by_block[index].append(_of_rank(name, size_of(parameter), num_sharing))
        else:
            size = replace(size_of(parameter), row_elements=row_elements.get(id(parameter), 0))
            (before if last_met < 0 else outside.setdefault(last_met, [])).append(size)
    if shared:
        every = whole()
        in_all = find_shared(find_blocks(every))
        before += [size_of(parameter) for parameter in every.parameters() if id(parameter) in in_all]
    return Tensors(
        before=tuple(before),
        by_block=tuple(tuple(sizes) for sizes in by_block),
        block_kinds=tuple(instances),
        after=tuple(outside.pop(len(blocks) - 1, ())),
        **_between_stacks(outside, instances),
    )


def _between_stacks(outside: Mapping[int, list[TensorSize]], instances: Sequence[int]) -> dict[str, Any]:
    """Sizes between two stacks of blocks. outside: by the block of the short model that they follow."""
    if not outside:
        return {}
    if len(outside) > 1:
        raise InvalidModel("the model cannot be traced: it has parameters between more than two stacks", field="config")
    ((before, sizes),) = outside.items()
    return {"between": tuple(sizes), "num_before_between": instances.index(before) + 1}


def _of_rank(name: str, size: TensorSize, num_sharing: int) -> TensorSize:
    """The size of a tensor of one of so many ranks that share each block."""
    if num_sharing == 1:
        return size
    return replace(size, is_partial=is_partial(name), num_parts=num_sharing if is_sliced(name) else 1)


def size_of(parameter: nn.Parameter) -> TensorSize:
    rows, columns = parameter.shape[-2:] if parameter.dim() >= 2 else (0, 0)
    return TensorSize(num_elements=parameter.numel(), is_matrix=parameter.dim() >= 2, rows=rows, columns=columns)


def find_shared(blocks: Sequence[nn.Module]) -> set[int]:
    """Ids of the parameters that more than one block has."""
    counts = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    return {key for key, count in counts.items() if count > 1}


def list_base(model: nn.Module, *, num_sharing: int = 1) -> BaseSizes:
    """model: short, on ``meta``, with adapters where it has any and its matrices in int8; of one of so many ranks that share each
    block.
    """
    blocks = find_blocks(model)
    shared = find_shared(blocks)
    owner = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    parameters = dict(model.named_parameters())
    sites = {site.name for site in list_sites(model)}
    before: list[BaseSize] = []
    by_block: list[list[BaseSize]] = [[] for _ in blocks]
    after: list[BaseSize] = []
    has_met_blocks = False
    for base in list_base_tensors(model):
        first = parameters[base.sources[0]]
        size = BaseSize(
            num_elements=torch.Size(base.shape).numel(),
            packs=base.form is not None,
            adapts=base.name in sites,
            num_scales=parameters[base.sources[1]].numel() if base.form is not None else 0,
            num_parts=num_sharing if is_sliced(base.name) else 1,
        )
        index = None if id(first) in shared else owner.get(id(first))
        has_met_blocks |= index is not None
        (by_block[index] if index is not None else after if has_met_blocks else before).append(size)
    return BaseSizes(before=tuple(before), by_block=tuple(tuple(sizes) for sizes in by_block), after=tuple(after))


def sum_frozen(model: nn.Module) -> FrozenBytes:
    blocks = find_blocks(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return FrozenBytes(
        outside=sum_storages(p for p in model.parameters() if not p.requires_grad and id(p) not in in_blocks),
        by_block=tuple(sum_storages(p for p in block.parameters() if not p.requires_grad) for block in blocks),
    )


def sum_in_depth(model: nn.Module, tensors: Iterable[torch.Tensor], instances: Sequence[int]) -> int:
    """Bytes in the whole model of tensors of the short one: what one block alone holds, every block like it holds too."""
    wanted = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    holders: Counter[int] = Counter()
    times: dict[int, int] = {}
    for index, block in enumerate(find_blocks(model)):
        held = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *block.buffers())}
        holders.update(held)
        times |= dict.fromkeys(held, instances.count(index))
    return sum(num_bytes * (times[key] if holders[key] == 1 else 1) for key, num_bytes in wanted.items())


def sum_storages(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
