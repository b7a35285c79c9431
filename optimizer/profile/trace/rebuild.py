"""Traces how blocks make keys and values again of hidden states (``runtime/generation/kv_prefix.py``), beside
``generation.py``.

The blocks' inputs are those of a prompt of as many tokens, which is run first and not noted.
"""

from collections.abc import Sequence
from typing import Any

import torch

from optimizer.formats.kv_prefix import SHORTEST_PREFIX, can_rebuild
from optimizer.models.anatomy import find_blocks
from optimizer.models.spec import ModelSpec
from optimizer.plan.generation import GenerationPlan, head_of
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.assemble.assemble import assemble_forward
from optimizer.profile.assemble.ranges import plan_ranges
from optimizer.profile.assemble.tables import PartTables
from optimizer.profile.events import Began, Event
from optimizer.profile.generation import ForwardRegime, KvTensors, Phase, block_part
from optimizer.profile.meta_ops.meta_ops import Ops, pretend_cpu
from optimizer.profile.ops import EMBEDDING, HEAD
from optimizer.profile.sizes import Shape
from optimizer.profile.trace.recorder import Recorder
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.generation.kv_prefix import BlockInputs, Positions, make_again
from optimizer.runtime.step.weights import torch_dtype

_TRACED, _END = "traced", "end"
_PARTS = {(_TRACED, -1): EMBEDDING, (head_of(_TRACED), -1): HEAD}


class RebuildTrace:
    """The trace of one model, in one representation after the other."""

    def __init__(self, spec: ModelSpec, *, instances: tuple[int, ...], ops: Ops) -> None:
        """Prepare to trace. instances: for each block of the whole model, which of the short one's it is."""
        self._spec, self._instances, self._ops = spec, instances, ops
        self._tables = PartTables()
        self._regimes: dict[str, tuple[ForwardRegime, ...]] = {}

    @property
    def phase(self) -> Phase | None:
        if not self._regimes:
            return None
        tables = self._tables
        return Phase(ops=tables.ops, changes=tables.changes, parts=tables.parts, regimes=self._regimes)

    def add(self, model: torch.nn.Module, weights: WeightsPlan, *, kv: Sequence[KvTensors]) -> None:
        """Add the passes of one representation. model: short, without data. kv: by its blocks. Nothing is traced where
        none of them can.
        """
        can = [
            can_rebuild(
                window=each.window, hidden_size=self._spec.hidden_size, elements_per_token=each.elements_per_token
            )
            for each in kv
        ]
        if not any(can):
            return
        ranges = plan_ranges(
            max_sequence_length=self._spec.max_sequence_length, sequence_limits=(), lowest=SHORTEST_PREFIX
        )
        found = []
        for place in ranges:
            runs = {
                shape: self._trace(model, weights, shape, kv=kv, can=can) for shape in (place.shape, *place.more_shapes)
            }
            parts = assemble_forward(runs, shape=place.shape, tables=self._tables)
            found.append(
                ForwardRegime(
                    micro_batch_low=place.micro_batch_low,
                    micro_batch_high=place.micro_batch_high,
                    sequence_low=place.sequence_low,
                    sequence_high=place.sequence_high,
                    parts={_PARTS.get(key) or block_part(key[1]): index for key, index in parts.items()},
                    shared=(),
                    templates={},
                    block_templates=self._instances,
                    kv_after=(-1,) * len(kv),
                )
            )
        self._regimes[weights.representation] = tuple(found)

    def _trace(
        self,
        model: torch.nn.Module,
        weights: WeightsPlan,
        shape: Shape,
        *,
        kv: Sequence[KvTensors],
        can: Sequence[bool],
    ) -> tuple[Event, ...]:
        batch, length = shape
        recorder = Recorder(self._ops)
        plan = GenerationPlan(batch_size=batch, weights=weights)
        with pretend_cpu(self._ops):
            generator = Generator(model, plan=plan, device=torch.device("cpu"), meter=recorder)
            try:
                with torch.no_grad(), generator.metered():
                    given = _run_prompt(generator, shape)
                    dtype = torch_dtype(weights)
                    hidden = torch.empty((batch, length, self._spec.hidden_size), dtype=dtype)
                    room = [_room(each, shape, dtype) if able else None for each, able in zip(kv, can, strict=True)]
                    recorder.start()
                    recorder.mark(_TRACED)
                    positions = Positions(meter=recorder)
                    inputs = [
                        BlockInputs.of_prompt(*each, positions=positions, num_tokens=length) if able else None
                        for each, able in zip(given, can, strict=True)
                    ]
                    recorder.set_region("activations")
                    for index, block in enumerate(find_blocks(model)):
                        recorder.mark(_TRACED, block_index=index)
                        into, its = room[index], inputs[index]
                        if into is not None and its is not None:
                            make_again(block, hidden, its, into=into)
                    recorder.mark(head_of(_TRACED))
                    recorder.stop()
                    recorder.mark(_END)
            finally:
                generator.close(keep_weights=False)
        events = recorder.events
        return tuple(events[events.index(Began(_TRACED, -1)) : events.index(Began(_END, -1))])


def _run_prompt(generator: Generator, shape: Shape) -> list[tuple[Any, dict[str, Any]]]:
    """Inputs that each block is given with it."""
    batch, length = shape
    given: list[tuple[Any, dict[str, Any]]] = []
    handles = [
        block.register_forward_pre_hook(lambda module, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
        for block in find_blocks(generator.model)
    ]
    try:
        ids, into = torch.zeros((batch, length), dtype=torch.long), torch.zeros(batch, dtype=torch.long)
        generator.advance(ids, cache=generator.make_cache(capacity=length), phase="prompt", into=into)
    finally:
        for handle in handles:
            handle.remove()
    return given


def _room(tensors: KvTensors, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in one row for each token, as in a slot."""
    batch, length = shape
    num_keys = batch * tensors.num_heads * tensors.key_dim
    rows = torch.empty((length, batch * tensors.elements_per_token), dtype=dtype)
    sizes = (length, batch, tensors.num_heads)
    return rows[:, :num_keys].view(*sizes, tensors.key_dim), rows[:, num_keys:].view(*sizes, tensors.value_dim)
