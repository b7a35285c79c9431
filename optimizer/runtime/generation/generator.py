"""Carries out an GenerationPlan: generation in passes, each a prefill of the prompts and then one token at a time.

Models are run by their own definitions. What is allocated in a pass, in order, which is the schedule that
``estimate/generation/pricing.py`` prices; each line for one micro-batch (``micro_batch.py``) after the other:

pass           the new tokens' ids (temporaries, to the end of the pass), the prompts' ids (temporaries, until the prefill ends)
prefill        the backbone over the prompts (activations); each block makes its keys and values (kv_cache) as it first runs,
               and runs for all micro-batches before the next block runs for any (``interleave.py``). When all backbones have
               ended, a copy of the last position's hidden states, and the logits of that position alone (logits and loss); where
               sequences draw, what ``sampling.py`` says beside them.
decode         the same with the newest token, once for each token but the first
leaving        where the cache is plain, sequences that are over leave their micro-batch when half of those that run are
               (``plan/passes/arrange.py``): what is kept of those that go on is moved to the front of the tensors, which stay
end            a micro-batch's cache goes as its last token is there

Keys and values that are packed or off the device come and go as ``kv_placed.py`` says, or stay on the host, where attention is
computed then (``kv_host_attention.py``); what their blocks share on the device
(``kv_workspace.py``) comes with the prefill and goes with the last cache. Streamed weights come and go with their blocks in
every such forward pass (``step/weights.py``), once for all micro-batches. Before the first pass files are read tensor by tensor
(``layers/filling.py``) under the same caps, as ``estimate/generation/load.py`` predicts it. *Not counted*: random weights as they
are drawn and packed.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.formats.sampling import Sampling
from optimizer.models.anatomy import find_anatomy
from optimizer.models.build import build_model, build_unfilled
from optimizer.models.files.load import find_reads
from optimizer.models.spec import ModelSpec
from optimizer.plan.devices.stages import StageOfModel
from optimizer.plan.generation import PREFILL, GenerationPlan, decode_phase, head_of
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.generation.cut import cut_model, own_blocks, with_tied_names
from optimizer.runtime.generation.interleave import Turns, check_turns
from optimizer.runtime.generation.kv_cache import KvCache, chain, find_windows
from optimizer.runtime.generation.kv_host_attention import attending_on_host, check_asks_for_attention, check_attended
from optimizer.runtime.generation.kv_prefix import check_prefixes, watch_prefixes
from optimizer.runtime.generation.kv_workspace import KvHomes, KvWorkspace
from optimizer.runtime.generation.micro_batch import MicroBatch, Watch
from optimizer.runtime.generation.sampling import Chooser, choose_tokens
from optimizer.runtime.layers.filling import fill_model
from optimizer.runtime.layers.grouped_attention import watch_attention
from optimizer.runtime.layers.matmul_dispatch import watch_products
from optimizer.runtime.layers.quantized_linear import freeze_base
from optimizer.runtime.meter.counting import CountingPolicy
from optimizer.runtime.meter.meter import Meter, check_peak, count_allocations, mark_phase, set_region
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.shared_homes import SharedHomes
from optimizer.runtime.step.allocator import apply_allocator
from optimizer.runtime.step.weights import StreamedWeights, name_streamed, torch_dtype
from optimizer.runtime.tiers.tiers import Tiers

STEPS_PER_CHECK = 32
"""Forward passes of a generation between two looks at a card's counters, which take a tenth of a millisecond or so."""


def build_for_generation(
    spec: ModelSpec,
    *,
    weights: WeightsPlan,
    device: torch.device,
    seed: int = 0,
    weights_folder: Path | None = None,
    stage: StageOfModel | None = None,
    meter: Meter | None = None,
) -> nn.Module:
    """The model as ``Generator`` takes it: on the device, or on the host where its blocks are to stream. stage: leaves what one
    stage of several runs.

    weights_folder: where the model's own weights are read from, one tensor at a time, each straight to its place. None leaves
    the random ones that ``seed`` draws; then what is packed or streamed is built on the host, so that the whole never stands on
    the device. meter: counts what is read, under its caps. Raises MissingExtra for bitsandbytes, OutOfDeviceMemory and
    OutOfHostMemory at the tensor that does not fit.
    """
    if weights_folder is not None:
        return _load_for_generation(
            spec, weights=weights, device=device, weights_folder=weights_folder, stage=stage, meter=meter
        )
    streams = weights.place != "device"
    on_host = streams or weights.frozen != "same" or stage is not None
    model = build_model(spec, dtype=torch_dtype(weights), device="cpu" if on_host else device, seed=seed)
    if stage is not None:
        cut_model(model, stage, device=device)
    prepare_for_generation(model, weights=weights, device=device)
    return model if streams else model.to(device)


def _load_for_generation(
    spec: ModelSpec,
    *,
    weights: WeightsPlan,
    device: torch.device,
    weights_folder: Path,
    stage: StageOfModel | None,
    meter: Meter | None,
) -> nn.Module:
    model = build_unfilled(spec, dtype=torch_dtype(weights))
    reads = find_reads(model, weights_folder)
    if stage is not None:
        reads = with_tied_names(model, reads)
        cut_model(model, stage, device=device)
    prepare_for_generation(model, weights=weights)
    streamed = name_streamed(model, trains_all=True) if weights.place != "device" else set()
    fill_model(model, reads, device=device, streamed=streamed, meter=meter)
    return model


def prepare_for_generation(model: nn.Module, *, weights: WeightsPlan, device: torch.device | None = None) -> None:
    """No dropout, no gradients, and the matrices inside the blocks packed where the plan says so; in place.

    device: where to pack, one matrix at a time; results return to where the matrix was.
    """
    model.requires_grad_(requires_grad=False).eval()
    if weights.frozen != "same":
        freeze_base(model, weights.frozen, device=device)


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Times of one pass."""

    prefill_ms: float
    """Until the prefills of all its micro-batches have ended, with a new token for each prompt that is no longer than them."""
    decode_ms: float
    """All the others."""
    num_steps: int
    """Forward passes, the prefill among them."""
    was_stopped: bool = False
    """True if it was left before its end."""


@dataclass(frozen=True, kw_only=True)
class FinishedPass(PassTimes):
    """The tokens of one pass, and its times."""

    tokens: torch.Tensor
    """[sequences, new tokens], int64, on the host."""


class Generator:
    """A model and its plan, ready to generate. Call ``close`` to leave the model as it was, in host memory where it streamed.

    model: from ``build_for_generation``, or prepared by ``prepare_for_generation``. meter: None runs without counting and
    without a cap. scratch: folder of the disk tier's file; the system's temporary folder unless given. Raises RemoteStoreLost
    where the plan needs a remote store and none answers at ``HEADROOM_REMOTE_URL``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: GenerationPlan,
        device: torch.device,
        meter: Meter | None = None,
        scratch: Path | None = None,
        stage: StageOfModel | None = None,
        homes: Ranks | None = None,
    ) -> None:
        """stage: which of the blocks run here, of a model that is cut. homes: the ranks that stream weights from one home."""
        self.model = model
        self.plan = plan
        self.device = device
        self.meter = meter
        self.windows = find_windows(model)
        self._anatomy = find_anatomy(model)
        self.blocks = own_blocks(self._anatomy.blocks, stage)
        """Those that run here."""
        self._attention: str | None = getattr(model.config, "_attn_implementation", None)
        self._handles: list[RemovableHandle] = []
        self._undo_layers: Callable[[], None] = lambda: None
        self._counting = CountingPolicy()
        self._turns = Turns(resumed=partial(set_region, meter, "activations"))
        takes_turns = plan.num_micro_batches > 1 and stage is None
        if takes_turns:
            check_turns()
        if plan.kv_cache.attention == "host":
            check_asks_for_attention(self._anatomy.blocks)
        apply_allocator(plan.allocator, device)
        self.tiers = Tiers(device=device, meter=meter, scratch=scratch)
        shared = None if homes is None else SharedHomes(homes, self.tiers)
        self._weights = StreamedWeights(self.tiers, plan=plan.weights, shared=shared)
        self._kv_homes = KvHomes(self.tiers)
        self._kv_workspace: weakref.ref[KvWorkspace] | None = None
        try:
            blocks = self.blocks
            if plan.kv_cache.place == "remote":
                # A store that is away is named before weights are sent anywhere.
                self.tiers.open_store("remote")
            self._weights.send_home(model, blocks=blocks, trains_all=True)
            if meter is not None:
                meter.assign_module(model)
            if takes_turns:
                self._handles += self._turns.watch(self._anatomy.backbone, blocks)
            if meter is not None:
                self._handles += meter.watch_blocks(blocks, phase=None)
            self._handles += self._weights.watch(self._anatomy.backbone, blocks, updates=None)
            if plan.kv_cache.prefix_tokens:
                self._handles += watch_prefixes(blocks)
            self._undo_layers = watch_products(model) if device.type == "cpu" else watch_attention(device)
        except BaseException:
            self.close(keep_weights=False)
            raise

    def generate(self, prompts: torch.Tensor, *, num_new_tokens: int) -> torch.Tensor:
        """[sequences, new tokens] for prompts [sequences, prompt length]; both int64, on the host."""
        passes = self.run_passes(
            torch.split(prompts, self.plan.sequences_per_pass), num_new_tokens=num_new_tokens
        )
        return torch.cat([each.tokens for each in passes])

    def run_passes(self, prompts: Sequence[torch.Tensor], *, num_new_tokens: int) -> Iterator[FinishedPass]:
        """One for each tensor of prompts, as they are done; each takes the likeliest tokens, always as many as asked for."""
        greedy = Sampling(max_new_tokens=num_new_tokens)
        for each in prompts:
            micro_batches = [
                self.micro_batch(part.tolist(), samplings=[greedy] * len(part))
                for part in torch.split(each, self.plan.batch_size)
            ]
            times = self.run_pass(micro_batches)
            yield FinishedPass(
                tokens=torch.cat([micro_batch.tokens[:, -num_new_tokens:] for micro_batch in micro_batches]),
                prefill_ms=times.prefill_ms,
                decode_ms=times.decode_ms,
                num_steps=times.num_steps,
            )

    def micro_batch(
        self, prompts: Sequence[Sequence[int]], *, samplings: Sequence[Sampling], watches: Sequence[Watch | None] = ()
    ) -> MicroBatch:
        """Run the pass as the plan says."""
        return MicroBatch(
            prompts,
            samplings=samplings,
            watches=watches,
            prefill_tokens=self.plan.prefill_tokens,
            drops_ended=self.plan.drops_ended,
        )

    def asks_to_stop(self, should_stop: Callable[[], bool]) -> bool:
        """Report whether no further pass is to begin; the same on all stages of a model that is cut."""
        return should_stop()

    def run_pass(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        counts_all: bool = True,
    ) -> PassTimes:
        """Until all sequences have ended. At most ``plan.num_micro_batches``. should_stop: asked after each forward pass.

        counts_all: False has the meter count the prefill, the first two decodes, those after which fewer sequences run, and now
        and then one between (``meter/counting.py``).
        """
        start_s = time.perf_counter()
        num_steps, prefill_s = self._run(micro_batches, should_stop, counts_all=counts_all)
        self._synchronize()
        end_s = time.perf_counter()
        check_peak(self.meter)
        for micro_batch in micro_batches:
            micro_batch.end()
        return PassTimes(
            prefill_ms=(prefill_s - start_s) * 1000,
            decode_ms=(end_s - prefill_s) * 1000,
            num_steps=num_steps,
            was_stopped=not all(micro_batch.is_done for micro_batch in micro_batches),
        )

    def make_cache(self, *, capacity: int, num_seen: int = 0, turn: int = 0) -> KvCache:
        """For one micro-batch. Its tensors are made as the blocks first run. Caches that are there together share a workspace.

        turn: of several, which comes how late in each block.
        """
        plan = self.plan.kv_cache
        workspace = self._kv_workspace() if self._kv_workspace is not None else None
        if workspace is None:
            workspace = KvWorkspace(device=self.device, prefetch=plan.prefetch, meter=self.meter)
            self._kv_workspace = weakref.ref(workspace)
        return KvCache(
            self.windows,
            capacity=capacity,
            num_seen=num_seen,
            meter=self.meter,
            plan=plan,
            workspace=workspace,
            homes=self._kv_homes,
            turn=turn,
        )

    def advance(
        self,
        ids: torch.Tensor,
        *,
        cache: KvCache,
        phase: str,
        into: torch.Tensor,
        choosers: Sequence[Chooser | None] = (),
    ) -> None:
        """The next token after ``ids`` [batch, length], written to ``into`` [batch]. phase: for peaks and errors."""
        mark_phase(self.meter, phase)
        set_region(self.meter, "activations")
        hidden = self._run_blocks(ids, cache)
        if hidden is not None:
            mark_phase(self.meter, head_of(phase))
            set_region(self.meter, "logits_and_loss")
            # A copy, so that the other positions go before the logits come.
            last = hidden[:, -1].clone()
            del hidden
            choose_tokens(self._anatomy.compute_logits(last), into=into, choosers=choosers)
        set_region(self.meter, "temporaries")

    def _run_blocks(self, ids: torch.Tensor, cache: KvCache) -> torch.Tensor | None:
        """Hidden states [batch, length, hidden] behind the last block; None where another device has that."""
        with self._attending(cache):
            hidden: torch.Tensor = self._anatomy.backbone(
                input_ids=ids, past_key_values=cache, use_cache=True
            ).last_hidden_state
        return hidden

    def check_now_and_then(self, num_steps: int) -> None:
        """Hold the device's peak against the cap while a pass runs, which may be long. num_steps: of this pass so far."""
        if num_steps % STEPS_PER_CHECK == 0:
            check_peak(self.meter)

    def close(self, *, keep_weights: bool = True) -> None:
        """Take off the hooks and end what streams. keep_weights: streamed weights become the model's again, in host memory."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._undo_layers()
        try:
            if keep_weights:
                self._weights.bind_homes()
        finally:
            self.tiers.close()

    def metered(self, *, is_counted: bool = True) -> AbstractContextManager[None]:
        """Count what is allocated inside, under the cap; does nothing without a meter. is_counted: as ``Trainer.metered``."""
        return count_allocations(self.meter, is_counted=is_counted)

    @torch.no_grad()
    def _run(
        self, micro_batches: Sequence[MicroBatch], should_stop: Callable[[], bool], *, counts_all: bool
    ) -> tuple[int, float]:
        """The number of forward passes, and the moment at which the first had ended."""
        last_alike = list_last_alike(micro_batches)
        try:
            with self.metered():
                mark_phase(self.meter, PREFILL)
                for micro_batch in micro_batches:
                    micro_batch.begin(self.device)
                running = [
                    (each, self.make_cache(capacity=each.shape.cache_length, turn=turn))
                    for turn, each in enumerate(micro_batches)
                ]
                self._forward(running, PREFILL)
                for micro_batch in micro_batches:
                    micro_batch.end_prefill()
                for _, cache in running:
                    check_prefixes(cache.layers)
                running = _still_running(running)
            self._synchronize()
            prefill_s = time.perf_counter()
            num_steps = 1
            while running and not should_stop():
                with self.metered(is_counted=counts_all or self._counting.is_due(num_steps, is_last=num_steps in last_alike)):
                    num_steps += 1
                    self._forward(running, decode_phase(num_steps))
                    running = _still_running(running)
                self.check_now_and_then(num_steps)
        finally:
            self._weights.release_all()
        return num_steps, prefill_s

    def _forward(self, running: Sequence[tuple[MicroBatch, KvCache]], phase: str) -> None:
        """One token more of each sequence."""
        if not self.plan.kv_cache.is_plain:
            chain([cache for _, cache in running])
        self._turns.run(
            [
                partial(
                    self.advance,
                    micro_batch.next_ids,
                    cache=cache,
                    phase=phase,
                    into=micro_batch.next_tokens,
                    choosers=micro_batch.choosers(),
                )
                for micro_batch, cache in running
            ]
        )
        for micro_batch, cache in running:
            micro_batch.note_step()
            kept = micro_batch.leave()
            if kept is not None:
                cache.keep_sequences(kept)

    @contextmanager
    def _attending(self, cache: KvCache) -> Iterator[None]:
        """Attention where keys and values are. Raises InvalidModel where the model does not let others attend."""
        if not cache.attends_on_host:
            yield
            return
        config: Any = self.model.config
        with attending_on_host(config, otherwise=self._attention):
            yield
        check_attended(cache.layers, config.model_type)

    def _synchronize(self) -> None:
        backend_of(self.device).synchronize()


def list_last_alike(micro_batches: Sequence[MicroBatch]) -> set[int]:
    """Steps after which fewer sequences run: a decode's peak grows until then."""
    return {
        micro_batch.shape.last_step_alike(since)
        for micro_batch in micro_batches
        for since in (0, *(since for since, _ in micro_batch.shape.leaving))
    }


def _still_running(running: Sequence[tuple[MicroBatch, KvCache]]) -> list[tuple[MicroBatch, KvCache]]:
    return [(micro_batch, cache) for micro_batch, cache in running if not micro_batch.is_done]
