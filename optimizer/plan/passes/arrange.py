"""Decides which prompts run together: one schedule of passes, which the estimator prices and the runtime runs. Torch-free.

Prompts of several lengths share a micro-batch without padding. Its prefill is as long as its shortest prompt; from there on
all its sequences stand at the same position in every step, and one whose prompt is longer is given its prompt's next token
instead of the one it would have generated. Nothing is masked and nothing computed twice; the cost is extra steps: as many as the
prompts of one micro-batch differ in length. So prompts are sorted by length, and neighbours are parted if their gap is larger
than the number of new tokens: two micro-batches then take fewer steps than one. If sequences ask for different numbers of new
tokens, those that ask for about as many may be grouped first, and prompts sorted within each group; the order that takes fewer
steps in all is used.

A sequence that is over leaves its micro-batch if its cache is plain (``GenerationPlan.drops_ended``). Sequences leave together,
when half of those that run are over and the rest have some steps to go, because the remaining cache is then moved together.

A plan may cut the prefill shorter still (``GenerationPlan.prefill_tokens``): every prompt is then a longer one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from optimizer.plan.generation import GenerationPlan
from optimizer.workload import GenerationWorkload

Lengths = tuple[int, int]
"""Prompt tokens and largest number of new tokens of one sequence."""
_LEAST_STEPS_TO_GO = 8
"""Fewest steps that justify moving the cache, which reads and writes it once: about two or three steps' attention."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """Sizes of one micro-batch that decide its bytes and its time."""

    batch_size: int
    prompt_length: int
    """Tokens of the prefill: those of the shortest prompt, or fewer."""
    num_steps: int
    """Forward passes until the last sequence is through, the prefill among them."""
    leaving: tuple[tuple[int, int], ...] = ()
    """Pairs of a step (the prefill is step 0) and how many sequences run from it on; empty if all run to the end."""

    @property
    def cache_length(self) -> int:
        """Tokens whose keys and values are kept: all but the last one, which nothing follows."""
        return self.prompt_length + self.num_steps - 1

    def num_running(self, step: int) -> int:
        """Sequences that run in a step."""
        return next((number for since, number in reversed(self.leaving) if step >= since), self.batch_size)

    def last_step_alike(self, step: int) -> int:
        """The last step in which as many sequences run as in this one."""
        return next((since for since, _ in self.leaving if since > step), self.num_steps) - 1

    @property
    def cache_stretches(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of a number of sequences and the length of the cache up to which that many run."""
        number = self.batch_size
        for since, fewer in self.leaving:
            yield number, self.prompt_length + since - 1
            number = fewer
        yield number, self.cache_length


def micro_batch_shape(
    lengths: Sequence[Lengths], *, prefill_tokens: int | None = None, drops_ended: bool = False
) -> MicroBatchShape:
    """The shape of a micro-batch of these sequences, in any order. prefill_tokens: at most; None for no limit. drops_ended: the
    plan's.
    """
    shortest = _prefill_length(min(prompt for prompt, _ in lengths), prefill_tokens)
    totals = sorted((prompt + num_new for prompt, num_new in lengths), reverse=True)
    return _shape_from_totals(totals, prompt_length=shortest, drops_ended=drops_ended)


def _shape_from_totals(totals: Sequence[int], *, prompt_length: int, drops_ended: bool) -> MicroBatchShape:
    """The shape of a micro-batch. totals: prompt and new tokens together of each sequence, the most first."""
    return MicroBatchShape(
        batch_size=len(totals),
        prompt_length=prompt_length,
        num_steps=totals[0] - prompt_length,
        leaving=tuple(_list_leaving(totals, prompt_length)) if drops_ended else (),
    )


def may_leave(*, num_running: int, num_live: int, num_steps_to_go: int) -> bool:
    """Return true if sequences that are over leave now. num_live: running sequences that are not over. num_steps_to_go: of the
    longest.
    """
    return 0 < 2 * num_live <= num_running and num_steps_to_go >= _LEAST_STEPS_TO_GO


def _list_leaving(totals: Sequence[int], prompt_length: int) -> Iterator[tuple[int, int]]:
    """Yield each step at which ``may_leave`` is true, and the sequences that run from it on."""
    num_running = len(totals)
    while num_running > 1:
        # As soon as this one is over, half of them are.
        end = totals[num_running // 2]
        num_live = bisect_left(totals, -end, key=lambda total: -total)
        if not may_leave(num_running=num_running, num_live=num_live, num_steps_to_go=totals[0] - end):
            return
        yield end - prompt_length, num_live
        num_running = num_live


def arrange_passes(
    lengths: Sequence[Lengths], *, batch_size: int, num_micro_batches: int
) -> list[list[tuple[int, ...]]]:
    """Passes in the order in which they run; a pass lists micro-batches, a micro-batch indices into ``lengths``.

    The longest prompts come first: the most memory is needed at once, and later passes are never slower than earlier ones.
    Equals keep their order.
    """
    found = []
    for parts in _list_partings(lengths):
        groups = [group for part in parts for group in _group_neighbours(part, lengths, batch_size=batch_size)]
        found.append([groups[start : start + num_micro_batches] for start in range(0, len(groups), num_micro_batches)])
    return min(found, key=lambda passes: sum(max(_num_steps(group, lengths) for group in each) for each in passes))


def _list_partings(lengths: Sequence[Lengths]) -> Iterator[list[list[int]]]:
    """Yield all sequences together and, if they ask for different numbers of new tokens, parted at the powers of two."""
    # ``reverse`` keeps the given order of equals.
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    yield [order]
    by_size: dict[int, list[int]] = {}
    for index in order:
        by_size.setdefault((lengths[index][1] - 1).bit_length(), []).append(index)
    if len(by_size) > 1:
        yield [by_size[size] for size in sorted(by_size, reverse=True)]


def _num_steps(group: Sequence[int], lengths: Sequence[Lengths]) -> int:
    """Count a group's steps without a cut prefill, which adds equally many to each group."""
    return max(sum(lengths[index]) for index in group) - min(lengths[index][0] for index in group)


PassShape = tuple[MicroBatchShape, ...]


def num_steps_of(shape: PassShape) -> int:
    """Forward passes until the last micro-batch is through."""
    return max(each.num_steps for each in shape)


def covers(larger: PassShape, smaller: PassShape) -> bool:
    """Return true if each micro-batch of the smaller pass matches one of the larger that has at least as many sequences, as long
    a prefill, and as long a cache, with as many sequences still there. If caches are equally long, steps count as well: each
    keeps a new token's id, which is less than one token keeps in a cache.
    """
    return len(larger) >= len(smaller) and all(
        one.batch_size >= other.batch_size
        and one.prompt_length >= other.prompt_length
        and (one.cache_length, one.num_steps) >= (other.cache_length, other.num_steps)
        and all(any(a >= b and c >= d for a, c in one.cache_stretches) for b, d in other.cache_stretches)
        for one, other in zip(larger, smaller, strict=False)
    )


def passes_of(plan: GenerationPlan, workload: GenerationWorkload) -> tuple[tuple[PassShape, int], ...]:
    """The passes of one plan, as ``list_passes`` lists them; of several copies of the model those of the first."""
    return list_passes(
        _share_of_first(workload, plan.layout.num_replicas),
        batch_size=plan.batch_size,
        num_micro_batches=plan.num_micro_batches,
        prefill_tokens=plan.prefill_tokens,
        drops_ended=plan.drops_ended,
    )


@lru_cache(maxsize=64)
def _share_of_first(workload: GenerationWorkload, num_replicas: int) -> GenerationWorkload:
    return workload.of_replica(0, num_replicas=num_replicas)


@lru_cache(maxsize=1024)
def list_passes(
    workload: GenerationWorkload,
    *,
    batch_size: int,
    num_micro_batches: int,
    prefill_tokens: int | None = None,
    drops_ended: bool = False,
) -> tuple[tuple[PassShape, int], ...]:
    """Distinct passes in the order in which they run, and the number of each. Passes of equal prompts cost nothing to list,
    however many there are.
    """
    if workload.new_token_counts:
        lengths = workload.lengths
        passes = arrange_passes(lengths, batch_size=batch_size, num_micro_batches=num_micro_batches)
        return _count_distinct(
            tuple(
                micro_batch_shape([lengths[index] for index in group], prefill_tokens=prefill_tokens, drops_ended=drops_ended)
                for group in each
            )
            for each in passes
        )
    if workload.prompt_lengths:
        stretches = _part_at_gaps(workload.prompt_lengths, widest_gap=workload.num_new_tokens)
        shapes = [
            shape
            for stretch in stretches
            for shape in _shapes_in(stretch, workload.num_new_tokens, batch_size, prefill_tokens, drops_ended=drops_ended)
        ]
        starts = range(0, len(shapes), num_micro_batches)
        return _count_distinct(tuple(shapes[start : start + num_micro_batches]) for start in starts)
    num_full, rest = divmod(workload.num_sequences, batch_size * num_micro_batches)
    in_full = _equal_shapes(workload, batch_size * num_micro_batches, batch_size, prefill_tokens)
    full = [(in_full, num_full)] if num_full else []
    last = [(_equal_shapes(workload, rest, batch_size, prefill_tokens), 1)] if rest else []
    return (*full, *last)


def _count_distinct(passes: Iterable[PassShape]) -> tuple[tuple[PassShape, int], ...]:
    return tuple(Counter(passes).items())


@lru_cache(maxsize=8)
def _part_at_gaps(prompt_lengths: tuple[int, ...], *, widest_gap: int) -> tuple[tuple[int, ...], ...]:
    """Prompt lengths, longest first, parted between neighbours too far apart to run together; made once for all plans."""
    ordered = sorted(prompt_lengths, reverse=True)
    gaps = [place for place in range(1, len(ordered)) if ordered[place - 1] - ordered[place] > widest_gap]
    return tuple(tuple(ordered[start:end]) for start, end in pairwise((0, *gaps, len(ordered))))


def _shapes_in(
    stretch: tuple[int, ...], num_new_tokens: int, batch_size: int, prefill_tokens: int | None, *, drops_ended: bool
) -> Iterator[MicroBatchShape]:
    """Yield the shapes that ``micro_batch_shape`` gives for the groups that ``_group_neighbours`` makes."""
    for start in range(0, len(stretch), batch_size):
        prompts = stretch[start : start + batch_size]
        totals = [prompt + num_new_tokens for prompt in prompts]
        yield _shape_from_totals(totals, prompt_length=_prefill_length(prompts[-1], prefill_tokens), drops_ended=drops_ended)


def _equal_shapes(
    workload: GenerationWorkload, num_sequences: int, batch_size: int, prefill_tokens: int | None
) -> PassShape:
    num_full, rest = divmod(num_sequences, batch_size)
    prefill = _prefill_length(workload.prompt_length, prefill_tokens)
    return tuple(
        MicroBatchShape(
            batch_size=size, prompt_length=prefill, num_steps=workload.prompt_length - prefill + workload.num_new_tokens
        )
        for size in (*[batch_size] * num_full, *([rest] if rest else ()))
    )


def _prefill_length(length: int, prefill_tokens: int | None) -> int:
    return length if prefill_tokens is None else min(length, prefill_tokens)


def _group_neighbours(order: Sequence[int], lengths: Sequence[Lengths], *, batch_size: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of neighbours that run as one micro-batch. order: the longest prompt first."""
    widest_gap = max((lengths[index][1] for index in order), default=0)
    group: list[int] = []
    before = 0
    for index in order:
        prompt = lengths[index][0]
        if group and (len(group) == batch_size or before - prompt > widest_gap):
            yield tuple(group)
            group = []
        group.append(index)
        before = prompt
    if group:
        yield tuple(group)
