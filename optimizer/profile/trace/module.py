"""Profiles any ``nn.Module`` by example inputs: ``trace.py`` for what is no language model.

The inputs' first dimension is the micro-batch, in which all sizes are polynomials; the others are fixed by the example. The
module's own shape, not its values, is what counts: it is never run with data, and no memory is taken for it.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from optimizer.base.errors import HeadroomError, InvalidModel
from optimizer.models.anatomy import Loss
from optimizer.models.plain import Inputs, PlainAnatomy, check_trains_all, plain_anatomy
from optimizer.plan.activations import BlockChoice
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.assemble.assemble import assemble_regime
from optimizer.profile.assemble.ranges import MICRO_BATCH_HIGH, SEQUENCE_LOW, ShapeRange
from optimizer.profile.assemble.tables import PartTables
from optimizer.profile.meta_ops.meta_ops import Ops
from optimizer.profile.profile import BLOCK_CHOICES, Profile, Regime, tail_name
from optimizer.profile.sizes import NUM_MONOMIALS, Shape, Terms
from optimizer.profile.trace.tensor_sizes import size_of, sum_storages
from optimizer.profile.trace.training_step import Subject, trace_evaluation, trace_step
from optimizer.profile.trained import Tensors, TensorSize
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.weights import torch_dtype

_BATCHES = (13, 7, 11, 5)
_SEQUENCE_HIGH = 131_072
"""A workload's sequence length means nothing here: any is as good as any other."""
_REPRESENTATIONS = (WeightsPlan(dtype="fp32"), WeightsPlan(dtype="bf16"), WeightsPlan(autocast="bf16"))


def profile_module(
    module: nn.Module | Callable[[], nn.Module],
    *,
    inputs: Inputs,
    labels: torch.Tensor,
    loss: Loss,
    blocks: Sequence[str] | None = None,
    has_single: bool = True,
) -> Profile:
    """A profile that ``estimate_training`` and the search take as any other's.

    module: one, which is left as it is, or what makes one; then it is made without memory. inputs, labels: an example, of which
    shapes and dtypes count; all have the micro-batch first. loss, blocks: as ``plain_anatomy`` takes them. has_single: whether
    micro-batches of one are profiled, which batch norm over vectors cannot train.
    Raises InvalidModel where an operation cannot be traced, because it depends on the data for instance, where a size is no
    polynomial in the micro-batch, and for frozen parameters.
    """
    whole = _on_meta(module)
    check_trains_all(whole)
    example = (inputs if isinstance(inputs, tuple) else (inputs,), labels)
    tables, ops = PartTables(), Ops()
    regimes: dict[str, tuple[Regime, ...]] = {}
    buffer_bytes: dict[str, int] = {}
    num_blocks = 0
    for weights in _REPRESENTATIONS:
        model = _on_meta(whole).to(torch_dtype(weights)).train()
        anatomy = plain_anatomy(model, loss=loss, blocks=blocks)
        num_blocks = len(anatomy.blocks)
        subject = Subject(
            model, weights, None, tuple(range(num_blocks)), anatomy=anatomy, make_inputs=partial(_make_like, *example)
        )
        regimes[weights.representation] = tuple(
            _trace(subject, place, tables=tables, ops=ops) for place in _list_ranges(has_single=has_single)
        )
        buffer_bytes[weights.dtype] = sum_storages(model.buffers())
    return Profile(
        model_fingerprint=f"module {type(whole).__qualname__}",
        model_type="module",
        num_blocks=num_blocks,
        hidden_size=0,
        vocab_size=0,
        max_sequence_length=_SEQUENCE_HIGH,
        torch_version=torch.__version__,
        input_bytes=sum(tensor[:1].nbytes for tensor in (*example[0], labels)),
        tensors=_list_tensors(plain_anatomy(whole, loss=loss, blocks=blocks)),
        buffer_bytes=buffer_bytes,
        frozen={},
        ops=tables.ops,
        changes=tables.changes,
        parts=tables.parts,
        regimes=regimes,
    )


def _make_like(inputs: tuple[torch.Tensor, ...], labels: torch.Tensor, shape: Shape) -> MicroBatch:
    """A micro-batch like the example."""
    made = [torch.zeros((shape[0], *each.shape[1:]), dtype=each.dtype) for each in (*inputs, labels)]
    return tuple(made[:-1]), made[-1]


def _on_meta(module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A copy without memory, or one that is made so."""
    if not isinstance(module, nn.Module):
        with torch.device("meta"):
            return module()
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _list_ranges(*, has_single: bool) -> list[ShapeRange]:
    """A micro-batch of one is a range of its own, as in ``assemble/ranges.py``. The sequence is that of no one."""
    shapes = {True: [(1, SEQUENCE_LOW + index) for index in range(2)], False: [(size, SEQUENCE_LOW) for size in _BATCHES]}
    return [
        ShapeRange(
            micro_batch_low=1 if is_one else 2,
            micro_batch_high=1 if is_one else MICRO_BATCH_HIGH,
            sequence_low=SEQUENCE_LOW,
            sequence_high=_SEQUENCE_HIGH,
            shape=shapes[is_one][0],
            more_shapes=tuple(shapes[is_one][1:]),
        )
        for is_one in ((True, False) if has_single else (False,))
    ]


def _trace(subject: Subject, place: ShapeRange, *, tables: PartTables, ops: Ops) -> Regime:
    try:
        whole = {
            choice: trace_step(subject, place.shape, choice, num_micro_batches=2, ops=ops) for choice in BLOCK_CHOICES
        }
        growth = {
            shape: trace_step(subject, shape, "keep", num_micro_batches=1, ops=ops, watches_holds=False)
            for shape in place.more_shapes
        }
        evaluation = {shape: trace_evaluation(subject, shape, ops=ops) for shape in (place.shape, *place.more_shapes)}
    except HeadroomError:
        raise
    except Exception as error:  # whatever the module's own code raises
        raise InvalidModel(
            f"the module cannot be traced at a micro-batch of {place.shape[0]}: {type(error).__name__}: {_first_line(error)}",
            field="module",
            hint="Its operations must not depend on the data, and every example must have the micro-batch as its first "
            "dimension.",
        ) from error
    regime = assemble_regime(
        whole,
        growth,
        evaluation=evaluation,
        place=place,
        block_templates=subject.instances,
        tables=tables,
        has_tails=True,
    )
    _check_choices_mix(regime, tables)
    return regime


def _check_choices_mix(regime: Regime, tables: PartTables) -> None:
    """Raise InvalidModel where what a block leaves behind depends on its choice: then so does what its neighbours must free."""
    for index in range(len(regime.block_templates)):
        left = {choice: _left_behind(regime, tables, choice, index) for choice in BLOCK_CHOICES}
        if len(set(left.values())) > 1:
            raise InvalidModel(
                f"the module cannot be profiled in these blocks: block {index + 1} keeps for its backward what it returns, "
                "as one that ends with ReLU does, or code around it holds what it is given, as a Sequential between others "
                "does; so what is freed where depends on its neighbours' choices",
                field="blocks",
                value=index,
                hint="Name blocks that end elsewhere, or none (blocks=()): then the whole module is one.",
            )


def _left_behind(regime: Regime, tables: PartTables, choice: BlockChoice, index: int) -> Terms:
    """Bytes on the device but for gradients, from the beginning of a block's forward to the end of its backward."""
    template = regime.templates[choice][index]
    parts = [template.forward, template.backward_first]
    if index == len(regime.block_templates) - 1:
        parts += [
            regime.parts[tail_name(name, choice)] for name in ("head", "head_backward_first", "norm_backward_first")
        ]
    total = [0] * NUM_MONOMIALS
    for part in parts:
        for change in (tables.changes[place] for place in tables.parts[part].changes):
            if change.tier == "device" and change.category != "gradients":
                total = [sum(pair) for pair in zip(total, change.num_bytes, strict=True)]
    return tuple(total)  # type: ignore[return-value]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _list_tensors(anatomy: PlainAnatomy) -> Tensors:
    """Every block is of its own kind. What several blocks share is listed ahead of them."""
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(anatomy.blocks):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    by_block: list[list[TensorSize]] = [[] for _ in anatomy.blocks]
    before: list[TensorSize] = []
    after: list[TensorSize] = []
    has_met_blocks = False
    for parameter in anatomy.model.parameters():
        found = owners.get(id(parameter), set())
        has_met_blocks = has_met_blocks or bool(found)
        if len(found) == 1:
            by_block[next(iter(found))].append(size_of(parameter))
        else:
            (after if has_met_blocks and not found else before).append(size_of(parameter))
    return Tensors(
        before=tuple(before),
        by_block=tuple(tuple(sizes) for sizes in by_block),
        block_kinds=tuple(range(len(by_block))),
        after=tuple(after),
    )
