"""Costs of making keys and values of a prompt's first tokens again for each token. Torch-free.

As ``runtime/generation/kv_prefix.py`` does it. Before a block's own task there are two then: hidden states come, and
keys and values are made of them; after that the rest of its cache must be there. *Not modelled*: copies of positions in
a prompt, a few small ops.
"""

from collections.abc import Sequence
from functools import cached_property, partial

from optimizer.base.categories import Link
from optimizer.base.errors import InvalidPlan
from optimizer.estimate.categories.stores import STORE_LINKS
from optimizer.estimate.shape.compiled import CompiledShape, PartRequest, compile_shape
from optimizer.estimate.tasks.tasks import Task, add_legs
from optimizer.estimate.tasks.transfers import Legs, Transfer
from optimizer.formats.kv_packing import KvLayout
from optimizer.formats.kv_prefix import count_rebuilt, prefix_refusal
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import MicroBatchShape
from optimizer.profile.generation import GenerationProfile, block_part
from optimizer.profile.ops import EMBEDDING


def find_prefix_conflict(profile: GenerationProfile, plan: GenerationPlan) -> InvalidPlan | None:
    """Why no block of the model can do what the plan says of a prefix; None where one can, or nothing is said."""
    prefix_tokens, kinds = plan.kv_cache.prefix_tokens, range(len(profile.kv))
    if not prefix_tokens or any(map(profile.can_rebuild, kinds)):
        return None
    size = plan.weights.bytes_per_element
    return prefix_refusal(
        prefix_tokens,
        has_windows=all(tensors.window is not None for tensors in profile.kv),
        state_bytes=profile.hidden_size * size,
        token_bytes=min(tensors.elements_per_token for tensors in profile.kv) * size,
    )


class PrefixCosts:
    """Costs of one micro-batch; ``num_tokens`` is 0 where the plan or its prompt leaves nothing to make again."""

    def __init__(self, profile: GenerationProfile, plan: GenerationPlan, machine: Machine, *, shape: MicroBatchShape) -> None:
        self._profile, self._plan, self._machine, self._shape = profile, plan, machine, shape
        self._num_tokens = count_rebuilt(plan.kv_cache.prefix_tokens, prompt_length=shape.prompt_length)

    def num_tokens(self, kind: int) -> int:
        """Tokens of the prefix in a distinct block."""
        return self._num_tokens if self._profile.can_rebuild(kind) else 0

    @cached_property
    def first_block(self) -> int:
        """The first that does it, with which positions come; -1 where none does."""
        profile = self._profile
        return next((b for b, kind in enumerate(profile.block_kinds) if self.num_tokens(kind)), -1)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Bytes on the device as long as the cache lives, one for each copy."""
        if self.first_block < 0:
            return ()
        return tuple(move.num_bytes for move in self._compiled.part_moves(PartRequest(EMBEDDING)) if move.num_bytes > 0)

    def part_ms(self, kind: int) -> float:
        """Compute time for each token."""
        return self._compiled.part_time(block_part(kind), self._machine, rates_key=self._rates_key).compute_ms

    def task(
        self, kind: int, layout: KvLayout, *, states: Transfer, begins: Sequence[Transfer], legs: Sequence[Legs]
    ) -> Task:
        """The task that makes keys and values of hidden states. states: the hidden states' coming. begins: what begins
        to come then. legs: all that come of these, for busy lanes.
        """
        compiled, part = self._compiled, block_part(kind)
        request = PartRequest(part)
        time = compiled.part_time(part, self._machine, rates_key=self._rates_key)
        for each in legs:
            time = add_legs(time, each)
        copied: dict[Link, int] = {"host_to_device": layout.prefix_bytes}
        if self._plan.kv_cache.place in STORE_LINKS:
            copied[STORE_LINKS[self._plan.kv_cache.place][1]] = layout.prefix_bytes
        return Task(
            phase="",
            block=-1,
            name="",
            bytes=compiled.part_bytes(request),
            time=time,
            copied=copied,
            arrives=(states,),
            begins=tuple(begins),
            moves=partial(compiled.part_moves, request),
            allocated_rise=partial(compiled.part_rise, request),
        )

    @cached_property
    def _compiled(self) -> CompiledShape:
        phase = self._profile.rebuild
        assert phase is not None
        return compile_shape(phase, self._plan.weights, (self._shape.batch_size, self._num_tokens))

    @cached_property
    def _rates_key(self) -> str:
        return f"{self._machine.device.kind} {self._machine.rates.fingerprint}"
