"""Which prompts run together: the one schedule of passes that the estimator prices and the runtime carries out. Torch-free.

Prompts of several lengths share a micro-batch without padding. Its prefill is as long as its shortest prompt; from there on
all its sequences stand at the same position in every step, and one whose prompt is longer is given its prompt's next token
instead of the one it would have generated. Nothing is masked and nothing computed twice; what it costs are steps: as many more
as the prompts of one micro-batch differ in length. So prompts are sorted by length, and neighbours are parted where their gap
is larger than what is generated: there two micro-batches take fewer steps than one.

A plan may cut the prefill shorter still (``InferencePlan.prefill_tokens``): every prompt is then a longer one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from optimizer.workload import InferenceWorkload

Lengths = tuple[int, int]
"""Of one sequence: tokens of its prompt, and new tokens at most."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """What decides the bytes and the time of one micro-batch."""

    batch_size: int
    prompt_length: int
    """Tokens of the prefill: of the shortest prompt, or fewer."""
    num_steps: int
    """Forward passes until the last sequence is through, the prefill among them."""

    @property
    def cache_length(self) -> int:
        """Tokens whose keys and values are kept: all but the last one, which nothing follows."""
        return self.prompt_length + self.num_steps - 1


def shape_of(lengths: Sequence[Lengths], *, prefill_tokens: int | None = None) -> MicroBatchShape:
    """Of the sequences of one micro-batch, in any order. prefill_tokens: at most; None for no limit."""
    shortest = _cut(min(prompt for prompt, _ in lengths), prefill_tokens)
    return MicroBatchShape(
        batch_size=len(lengths),
        prompt_length=shortest,
        num_steps=max(prompt + num_new for prompt, num_new in lengths) - shortest,
    )


def arrange_passes(
    lengths: Sequence[Lengths], *, batch_size: int, num_micro_batches: int
) -> list[list[tuple[int, ...]]]:
    """Passes in the order in which they run, each of its micro-batches, each of indices into ``lengths``.

    The longest come first: what needs most memory is known at once, and what is still to come is never slower than it was.
    Equals keep their order. Sequences of fewer new tokens change nothing in which prompt lengths run together, so that no pass
    needs more than where all generate the most.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    # Of equals ``reverse`` keeps the order in which they were given.
    most_new = max((num_new for _, num_new in lengths), default=0)
    groups = list(_group([(index, lengths[index][0]) for index in order], batch_size=batch_size, widest_gap=most_new))
    return [groups[start : start + num_micro_batches] for start in range(0, len(groups), num_micro_batches)]


PassShape = tuple[MicroBatchShape, ...]


def num_steps_of(shape: PassShape) -> int:
    """Forward passes until the last micro-batch is through."""
    return max(each.num_steps for each in shape)


def covers(larger: PassShape, smaller: PassShape) -> bool:
    """Whether each micro-batch of the smaller one stands against one of the larger that has at least as many sequences, as long a
    prefill, and as long a cache. Of caches as long the steps count as well: for each there is a new token's id, which is less
    than what one token keeps in a cache.
    """
    return len(larger) >= len(smaller) and all(
        one.batch_size >= other.batch_size
        and one.prompt_length >= other.prompt_length
        and (one.cache_length, one.num_steps) >= (other.cache_length, other.num_steps)
        for one, other in zip(larger, smaller, strict=False)
    )


@lru_cache(maxsize=1024)
def list_passes(
    workload: InferenceWorkload, *, batch_size: int, num_micro_batches: int, prefill_tokens: int | None = None
) -> tuple[tuple[PassShape, int], ...]:
    """Distinct passes in the order in which they run, and how many there are of each. Those of equal prompts cost nothing to
    list, however many there are.
    """
    if workload.prompt_lengths:
        stretches = _stretches(workload.prompt_lengths, widest_gap=workload.num_new_tokens)
        shapes = [
            shape
            for stretch in stretches
            for shape in _shapes_in(stretch, workload.num_new_tokens, batch_size, prefill_tokens)
        ]
        starts = range(0, len(shapes), num_micro_batches)
        return tuple(Counter(tuple(shapes[start : start + num_micro_batches]) for start in starts).items())
    num_full, rest = divmod(workload.num_sequences, batch_size * num_micro_batches)
    in_full = _equal_shapes(workload, batch_size * num_micro_batches, batch_size, prefill_tokens)
    passes = [(in_full, num_full)] if num_full else []
    last = [(_equal_shapes(workload, rest, batch_size, prefill_tokens), 1)] if rest else []
    return (*passes, *last)


@lru_cache(maxsize=8)
def _stretches(prompt_lengths: tuple[int, ...], *, widest_gap: int) -> tuple[tuple[int, ...], ...]:
    """The longest first, parted where two neighbours are too far apart to run together; made once for all plans."""
    ordered = sorted(prompt_lengths, reverse=True)
    gaps = [place for place in range(1, len(ordered)) if ordered[place - 1] - ordered[place] > widest_gap]
    return tuple(tuple(ordered[start:end]) for start, end in pairwise((0, *gaps, len(ordered))))


def _shapes_in(
    stretch: tuple[int, ...], num_new_tokens: int, batch_size: int, prefill_tokens: int | None
) -> Iterator[MicroBatchShape]:
    """What ``shape_of`` says of ``_group``'s groups, by their ends alone."""
    for start in range(0, len(stretch), batch_size):
        end = min(start + batch_size, len(stretch))
        longest, shortest = stretch[start], _cut(stretch[end - 1], prefill_tokens)
        yield MicroBatchShape(
            batch_size=end - start, prompt_length=shortest, num_steps=longest - shortest + num_new_tokens
        )


def _equal_shapes(
    workload: InferenceWorkload, num_sequences: int, batch_size: int, prefill_tokens: int | None
) -> PassShape:
    num_full, rest = divmod(num_sequences, batch_size)
    prefill = _cut(workload.prompt_length, prefill_tokens)
    return tuple(
        MicroBatchShape(
            batch_size=size, prompt_length=prefill, num_steps=workload.prompt_length - prefill + workload.num_new_tokens
        )
        for size in (*[batch_size] * num_full, *([rest] if rest else ()))
    )


def _cut(length: int, prefill_tokens: int | None) -> int:
    return length if prefill_tokens is None else min(length, prefill_tokens)


def _group(
    order: Sequence[tuple[int, int]], *, batch_size: int, widest_gap: int
) -> Iterator[tuple[int, ...]]:
    """order: (index, prompt length), the longest first."""
    group: list[int] = []
    before = 0
    for index, prompt in order:
        if group and (len(group) == batch_size or before - prompt > widest_gap):
            yield tuple(group)
            group = []
        group.append(index)
        before = prompt
    if group:
        yield tuple(group)
