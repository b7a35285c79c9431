"""One rank of a cut model: the trained tensors that it keeps, and its bytes of weights. Torch-free.

The same as ``runtime/ranks/pipeline/keepers.py`` deals out.
"""

from collections.abc import Sequence

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.shape.completed import CompletedGradients
from optimizer.formats.two_halves import IN_TWO_HALVES
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.trained import BaseSize

_FIELD = "plan.layout.stage_blocks"


def check_cut(profile: Profile) -> None:
    """Raise InvalidPlan for a model that cannot be cut over devices for training."""
    why = find_obstacle(profile)
    if why:
        raise InvalidPlan(
            f"{_FIELD} cuts the model, {why}", field=_FIELD, value=profile.model_type, allowed="a model that is not cut"
        )


def find_obstacle(profile: Profile) -> str:
    """Why a model cannot be cut, in words; empty where it can."""
    if profile.model_type not in IN_TWO_HALVES:
        return f"which is carried out for causal decoders alone; {profile.model_type or 'this module'} is none: use zero3"
    if profile.base is None:
        return "but its profile does not know which tensors belong to which block: use zero3"
    if _projects_embeddings(profile):
        return "but its embeddings are of another width than its blocks: use zero3"
    if _is_shared(profile):
        return "but its blocks share weights, which stages cannot: use one device"
    if _trains_all(profile) and is_tied(profile):
        return (
            "but its embedding and its head are one tensor (tied), which would be trained on the first stage and on the last: "
            "train adapters, or use zero3"
        )
    return ""


def is_tied(profile: Profile) -> bool:
    """True if the head is the embedding."""
    if profile.base is None:
        return False
    vocabulary, smallest = profile.vocab_size, profile.vocab_size * min(profile.hidden_size, 2)
    return not any(
        size.num_elements % vocabulary == 0 and size.num_elements >= smallest for size in profile.base.after
    )


def tensors_of_stages(trained: TensorList, compiled: CompiledShape, own: RankStages) -> TensorList:
    """The trained tensors that a rank keeps. trained: those of the whole model."""
    places = CompletedGradients.find(compiled, trained).by_place
    behind = frozenset((*places["head"], *places["norm"]))
    return trained.of_stages(own, behind=behind)


def estimate_stages_weight_bytes(profile: Profile, plan: WeightsPlan, tensors: TensorList, own: RankStages) -> int:
    """Bytes of weights on a rank's device: what it trains, what is frozen in its blocks and at its end of the model, and all
    buffers. tensors: the rank's.
    """
    buffers_bytes = profile.buffer_bytes["fp32" if plan.dtype == "fp32" else "bf16"]
    trained_bytes = tensors.total_elements * plan.bytes_per_element
    if _trains_all(profile):
        return trained_bytes + buffers_bytes + plan.bytes_per_element * _count_stand_ins(profile, own)
    frozen = profile.frozen_bytes(plan.representation)
    kinds = profile.tensors.block_kinds
    in_blocks_bytes = sum(frozen.by_block[kinds[block]] for block in own.blocks)
    return trained_bytes + in_blocks_bytes + _outside_bytes(profile, plan, own) + buffers_bytes


def _outside_bytes(profile: Profile, plan: WeightsPlan, own: RankStages) -> int:
    """Frozen weights of no block: before the blocks on the first rank, behind them on the last; a tied embedding on both."""
    assert profile.base is not None
    size, before, behind = plan.bytes_per_element, profile.base.before, profile.base.after
    num_bytes = size * _count_stand_ins(profile, own)
    if own.is_first:
        num_bytes += size * _count(before)
    if own.is_last:
        num_bytes += size * _count(behind)
        if is_tied(profile):
            num_bytes += size * max((each.num_elements for each in before), default=0)
    return num_bytes


def _count_stand_ins(profile: Profile, own: RankStages) -> int:
    """Tensors of no block of which there is one number because others keep them."""
    assert profile.base is not None
    found = 0 if own.is_last else len(profile.base.after)
    if not own.is_first:
        found += len(profile.base.before) - (own.is_last and is_tied(profile))
    return found


def _count(sizes: Sequence[BaseSize]) -> int:
    return sum(size.num_elements for size in sizes)


def _trains_all(profile: Profile) -> bool:
    return not profile.frozen


def _projects_embeddings(profile: Profile) -> bool:
    """True where a projection stands between the embeddings and the blocks (OPT-350m)."""
    before = profile.base.before if profile.base is not None else ()
    found = {size.num_elements // profile.vocab_size for size in before if size.num_elements % profile.vocab_size == 0}
    return bool(found) and profile.hidden_size not in found


def _is_shared(profile: Profile) -> bool:
    """True where a kind of block has no tensors of its own, since others have them too."""
    return any(not sizes for sizes in (profile.base.by_block if profile.base is not None else ()))
