"""One stage's part of a generation: the blocks of its own, on its own device, beside the other stages.

A pass is that of ``generator.py``, but that micro-batches follow one another: each runs through all blocks of the stage, and its
hidden states go on before the next one begins. So a stage works on one while others work on those before and behind it. All
stages keep the same account of every micro-batch (what was given, who is over), from the tokens that the last one sends.

prefill   as on one device, for the blocks of the stage; in the place of the blocks before them the hidden states that come
decode    before a micro-batch runs again its newest token comes from the last stage; who is over leaves then
end       a micro-batch's cache goes with the step after which none of its sequences can have another token, or as soon as the
          tokens say that all are over
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.models.anatomy import hidden_state_of
from optimizer.plan.generation import PREFILL, GenerationPlan, decode_phase
from optimizer.runtime.generation.cut import PassedOver
from optimizer.runtime.generation.generator import Generator, list_last_alike
from optimizer.runtime.generation.kv_cache import KvCache
from optimizer.runtime.generation.micro_batch import MicroBatch
from optimizer.runtime.generation.stages.link import StageLink
from optimizer.runtime.meter.meter import Meter, mark_phase


@dataclass(kw_only=True, eq=False)
class _Running:
    """A micro-batch on its way through a pass."""

    turn: int
    micro_batch: MicroBatch
    cache: KvCache | None

    def forget_ended(self, num_steps: int) -> None:
        if num_steps >= self.micro_batch.shape.num_steps:
            self.cache = None


class StagedGenerator(Generator):
    """One stage of a model that is cut, ready to generate; ``run_pass`` must be called by all stages alike.

    model: from ``build_for_generation`` with this stage. The tokens of every micro-batch are there on each stage.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: GenerationPlan,
        device: torch.device,
        link: StageLink,
        meter: Meter | None = None,
        scratch: Path | None = None,
    ) -> None:
        self._link = link
        super().__init__(model, plan=plan, device=device, meter=meter, scratch=scratch, stage=link.stage)
        stand_ins = [module for module in model.modules() if isinstance(module, PassedOver)]
        before = stand_ins[: link.stage.first_block]
        if before:
            before[-1].arrive = link.receive_hidden
        if not link.stage.is_last:
            self._handles.append(self.blocks[-1].register_forward_hook(self._leave))

    def asks_to_stop(self, should_stop: Callable[[], bool]) -> bool:
        is_over = self._link.stops(should_stop)
        if is_over:
            self._link.finish()
        return is_over

    def _run_blocks(self, ids: torch.Tensor, cache: KvCache) -> torch.Tensor | None:
        """End with the stage's last block, unless it is the model's."""
        try:
            hidden = super()._run_blocks(ids, cache)
        except _StageEnded:
            hidden = None
        cache.pass_over(ids.shape[1], but=self._link.stage.blocks)
        return hidden

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._link.send_hidden(hidden_state_of(output))
        raise _StageEnded

    @torch.no_grad()
    def _run(
        self, micro_batches: Sequence[MicroBatch], should_stop: Callable[[], bool], *, counts_all: bool
    ) -> tuple[int, float]:
        last_alike = list_last_alike(micro_batches)
        with self.metered():
            mark_phase(self.meter, PREFILL)
            for micro_batch in micro_batches:
                micro_batch.begin(self.device)
            running = [
                _Running(
                    turn=turn, micro_batch=each, cache=self.make_cache(capacity=each.shape.cache_length, turn=turn)
                )
                for turn, each in enumerate(micro_batches)
            ]
            self._step(running, PREFILL, num_steps=1)
            for micro_batch in micro_batches:
                micro_batch.end_prefill()
        num_steps, prefill_s = 1, 0.0
        while running:
            if self._link.stops(should_stop):
                for each in running:
                    self._settle(each)
                break
            is_counted = counts_all or self._counting.is_due(num_steps, is_last=num_steps in last_alike)
            with self.metered(is_counted=is_counted):
                running = self._step(running, decode_phase(num_steps + 1), num_steps=num_steps + 1, settles=True)
            num_steps += bool(running)
            self.check_now_and_then(num_steps)
            # Until here the first tokens have come, of all micro-batches.
            prefill_s = prefill_s or time.perf_counter()
        self._link.finish()
        return num_steps, prefill_s or time.perf_counter()

    def _step(
        self, running: Sequence[_Running], phase: str, *, num_steps: int, settles: bool = False
    ) -> list[_Running]:
        """One token more of each micro-batch; those that go on. settles: the tokens of the step before come first."""
        ran = []
        for each in running:
            if settles:
                self._settle(each)
            if each.cache is not None and not (settles and each.micro_batch.is_done):
                self._advance(each, phase)
                ran.append(each)
            else:
                each.cache = None
        for each in ran:
            each.forget_ended(num_steps)
        return ran

    def _advance(self, running: _Running, phase: str) -> None:
        micro_batch, cache = running.micro_batch, running.cache
        assert cache is not None
        tokens = micro_batch.next_tokens
        self.advance(micro_batch.next_ids, cache=cache, phase=phase, into=tokens, choosers=micro_batch.choosers())
        if self._link.stage.is_last:
            self._link.send_tokens(running.turn, tokens)

    def _settle(self, running: _Running) -> None:
        """Note the tokens of the last step; who is over leaves."""
        micro_batch = running.micro_batch
        if not self._link.stage.is_last:
            self._link.receive_tokens(micro_batch.next_tokens)
        micro_batch.note_step()
        kept = micro_batch.leave()
        if kept is not None and running.cache is not None:
            running.cache.keep_sequences(kept)


class _StageEnded(Exception):
    """Ends a model's forward where the stage ends."""
