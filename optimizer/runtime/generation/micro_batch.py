"""The sequences of one micro-batch: what each is given next, what it was given so far, and when it is over.

All stand at the same position in every step (``plan/passes/arrange.py``): the prefill is as long as the shortest prompt, or
shorter, and a longer prompt's further tokens are given one by one, in place of what would have been generated. A sequence that
is over leaves with others, where it may (``leave``); else it runs on unseen until all are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from optimizer.formats.sampling import Sampling
from optimizer.plan.passes.arrange import MicroBatchShape, may_leave, micro_batch_shape
from optimizer.runtime.generation.kv_layer import move_to_front
from optimizer.runtime.generation.sampling import Chooser

FinishReason = Literal["stop", "length"]
Watch = Callable[[int], bool]
"""Called with each new token of one sequence: whether it is the last."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The end of one sequence."""

    token_ids: tuple[int, ...]
    """New ones; what stopped it is the last of them."""
    finish_reason: FinishReason


class MicroBatch:
    """Make it outside the meter: what it keeps on the host is no part of what runs on the CPU device.

    prompts: the longest first, none empty. watches: by prompt, what beside a stop token ends it; may be shorter than the prompts.
    prefill_tokens, drops_ended: as the plan's.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samplings: Sequence[Sampling],
        watches: Sequence[Watch | None] = (),
        prefill_tokens: int | None = None,
        drops_ended: bool = False,
    ) -> None:
        self.shape = micro_batch_shape(
            [(len(prompt), sampling.max_new_tokens) for prompt, sampling in zip(prompts, samplings, strict=True)],
            prefill_tokens=prefill_tokens,
            drops_ended=drops_ended,
        )
        """The shape that it would have without stops."""
        self._drops_ended = drops_ended
        shared = self.shape.prompt_length
        self._shared_ids = torch.tensor([prompt[:shared] for prompt in prompts], dtype=torch.long)
        self._extra = [len(prompt) - shared for prompt in prompts]
        """Tokens of each prompt that come after the prefill."""
        self._extra_ids = torch.zeros((max(self._extra), len(prompts)), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self._extra_ids[: self._extra[row], row] = torch.tensor(prompt[shared:], dtype=torch.long)
        self._choosers = [None if sampling.is_greedy else Chooser(sampling) for sampling in samplings]
        self._stops = [frozenset(sampling.stop_token_ids) for sampling in samplings]
        self._watches = [*watches, *[None] * (len(prompts) - len(watches))]
        self._ends = [
            extra + sampling.max_new_tokens for extra, sampling in zip(self._extra, samplings, strict=True)
        ]
        """By sequence, the steps after which it is over."""
        self._stopped = [False] * len(prompts)
        self._running = list(range(len(prompts)))
        """Sequences that have not left, in the order of the rows that they take up."""
        self._left: dict[int, Generated] = {}
        self._leaving: list[tuple[int, int]] = []
        """``MicroBatchShape.leaving`` for the sequences that left."""
        self._untaken = list(range(len(prompts)))
        self._num_steps = 0
        self._is_over = False
        self._tokens = torch.empty(0)
        self._ids: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        return self._num_steps >= max(self._ends)

    @property
    def num_generated(self) -> int:
        """New tokens so far, of all sequences."""
        done = self._num_steps
        return sum(max(0, min(done, end) - extra) for end, extra in zip(self._ends, self._extra, strict=True))

    @property
    def shape_run(self) -> MicroBatchShape:
        """The shape of what ran so far; the prefill at least."""
        return replace(self.shape, num_steps=max(1, self._num_steps), leaving=tuple(self._leaving))

    def begin(self, device: torch.device) -> None:
        """Room for the new tokens, and the prompts as far as the prefill goes."""
        shape = (self.shape.num_steps, self.shape.batch_size)
        self._tokens = torch.empty(shape, dtype=torch.long, device=device)
        self._ids = self._shared_ids.to(device, copy=True)

    def end_prefill(self) -> None:
        self._ids = None

    @property
    def next_ids(self) -> torch.Tensor:
        """The tokens for the next step, [batch, tokens]."""
        if self._ids is not None:
            return self._ids
        return self._tokens[self._num_steps - 1, : len(self._running)].unsqueeze(1)

    @property
    def next_tokens(self) -> torch.Tensor:
        """Slots into which the next tokens go, [batch]."""
        return self._tokens[self._num_steps, : len(self._running)]

    def choosers(self) -> list[Chooser | None]:
        """Samplings of the sequences that draw in the next step."""
        step = self._num_steps
        return [
            self._choosers[index] if self._extra[index] <= step < self._ends[index] else None for index in self._running
        ]

    def note_step(self) -> None:
        """After each step: longer prompts go on, and who came to a stop token or whose watch says so is over."""
        step = self._num_steps
        num_longer = sum(self._extra[index] > step for index in self._running)
        if num_longer:
            self._tokens[step, :num_longer].copy_(self._extra_ids[step, :num_longer])
        self._num_steps += 1
        watched = [
            (row, index)
            for row, index in enumerate(self._running)
            if (self._stops[index] or self._watches[index] is not None) and self._extra[index] <= step < self._ends[index]
        ]
        if watched:
            tokens = self._tokens[step].tolist()
            for row, index in watched:
                watch = self._watches[index]
                if tokens[row] in self._stops[index] or (watch is not None and watch(tokens[row])):
                    self._stopped[index] = True
                    self._ends[index] = step + 1

    def leave(self) -> list[int] | None:
        """Let go who is over, where ``may_leave`` says so. The rows that are kept, in rising order; None where all stay."""
        if not self._drops_ended:
            return None
        step = self._num_steps
        kept = [row for row, index in enumerate(self._running) if self._ends[index] > step]
        num_steps_to_go = max(self._ends[index] for index in self._running) - step
        if not may_leave(num_running=len(self._running), num_live=len(kept), num_steps_to_go=num_steps_to_go):
            return None
        self._left |= {index: self._generated(index) for index in self._running if self._ends[index] <= step}
        for tokens in (self._tokens[:step], self._extra_ids):
            move_to_front(tokens.t(), kept)
        self._running = [self._running[row] for row in kept]
        self._leaving.append((step, len(kept)))
        return kept

    def end(self) -> None:
        """Leave nothing on the device, as the pass ends."""
        self._ids = None
        self._is_over = True
        # Where both are the same memory, a copy of what the meter counts.
        self._tokens = self._tokens.t().to("cpu", copy=True).contiguous()

    @property
    def tokens(self) -> torch.Tensor:
        """After the end, [batch, steps] on the host: of each step, what came of it or what was given. Of batches whose sequences
        all end together.
        """
        return self._tokens

    def take_ended(self) -> list[tuple[int, Generated]]:
        """Sequences that are over and were not taken before, by their place among the prompts; during the pass and after it."""
        ended = [index for index in self._untaken if self._ends[index] <= self._num_steps]
        self._untaken = [index for index in self._untaken if index not in ended]
        return [(index, self._generated(index)) for index in ended]

    def _generated(self, index: int) -> Generated:
        if index in self._left:
            return self._left[index]
        row = self._running.index(index)
        tokens = self._tokens[row] if self._is_over else self._tokens[:, row]
        return Generated(
            token_ids=tuple(tokens[self._extra[index] : self._ends[index]].tolist()),
            finish_reason="stop" if self._stopped[index] else "length",
        )
