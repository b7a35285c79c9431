"""One device's part of a training step: its stages, one after the other, over several micro-batches under way.

Each stage runs the model's own forward. Blocks of other stages give their input back; the last before the stage's own gives what
came from the stage before, in a new tensor, as a block would. Behind its last block a stage sends its hidden states on and leaves
the forward by an exception. Backward begins there, with the gradient that the next stage sends, and ends where hidden states came
in, with what goes to the stage before.

A device with several stages does one at a time, for all micro-batches, and what streams stays until they have used it.

Both ends are nodes of autograd's graph, which receive and send when autograd comes to them; so neither hidden states nor
gradients live longer than they would between two blocks of one device, but until they are taken (``link.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.formats.two_halves import RETURN_TUPLES
from optimizer.models.anatomy import Anatomy, hidden_state_of
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.devices.stages import StageOfModel, count_sent_at_once, list_turns
from optimizer.runtime.meter.meter import Meter, mark_phase, set_region
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.pipeline.keepers import require_decoder
from optimizer.runtime.ranks.pipeline.link import PipelineLink

MicroBatch = tuple[Any, ...]
"""The same as in ``runtime/step/micro_batch.py``."""
LossOf = Callable[[MicroBatch], torch.Tensor]


class Visits(Protocol):
    """Whoever has to know which of a device's stages runs."""

    def begin_stage(self, stage: StageOfModel) -> None: ...

    def end_stages(self) -> None: ...


class PipelineStages:
    """The stages of one rank. Call ``watch`` once, after every other hook on the blocks is in place."""

    def __init__(
        self, ranks: Ranks, *, layout: DeviceLayout, num_micro_batches: int, anatomy: Anatomy, meter: Meter | None
    ) -> None:
        """num_micro_batches: of a step. Raises InvalidModel for a model that cannot be cut."""
        require_decoder(anatomy)
        self.own = layout.rank_stages[ranks.rank]
        self._layout, self._anatomy, self._meter = layout, anatomy, meter
        self._num_micro_batches = num_micro_batches
        self._ranks = ranks
        self._link = PipelineLink(ranks, self.own)
        self._is_alone = False
        self._running = self.own.stages[0]
        self._visits: Visits | None = None
        self._leaving: Callable[[], None] = lambda: None
        # Makes autograd follow hidden states that come from elsewhere.
        self._root = torch.empty(0, requires_grad=True)

    def watch(self, *, leaving: Callable[[], None], visits: Visits) -> tuple[list[RemovableHandle], Callable[[], None]]:
        """Take the place of other stages' blocks; returns hooks, and a function that gives the blocks their forwards back.

        leaving: is called where a stage leaves the forward before the model's end.
        """
        self._leaving, self._visits = leaving, visits
        blocks, handles = self._anatomy.blocks, []
        in_tuple = getattr(self._anatomy.model.config, "model_type", None) in RETURN_TUPLES
        always_run = self.own.blocks if len(self.own.stages) == 1 else ()
        wrapped = [(index, block, vars(block).get("forward")) for index, block in enumerate(blocks) if index not in always_run]
        for index, block, _ in wrapped:
            block.forward = self._passing_over(block.forward, index, in_tuple=in_tuple)
        handles += [
            blocks[stage.blocks[-1]].register_forward_hook(partial(self._leave, stage))
            for stage in self.own.stages
            if not stage.is_last
        ]

        def undo() -> None:
            for _, block, before in wrapped:
                if before is None:
                    del block.forward
                else:
                    block.forward = before

        return handles, undo

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, this rank runs the whole model, whose other weights somebody brings."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def runs(self, block: int) -> bool:
        """True where a block's own forward is what runs now, and not only what it is given back."""
        return self._is_alone or block in self._running.blocks

    def run_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        loss_of: LossOf,
        backward: Callable[[torch.Tensor], None],
        begin_backward: Callable[..., None],
        end_backward: Callable[[], None],
        weigh: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the sum of their losses as ``weigh`` weighs them, which the rank
        with the last stage has; a zero on the others. Raises RankLost.
        """
        under_way: dict[tuple[int, int], torch.Tensor] = {}
        total: torch.Tensor | None = None
        num_micro_batches = len(micro_batches)
        self._link.begin(count_sent_at_once(self.own, num_micro_batches=num_micro_batches))
        for kind, index, number in list_turns(self.own, num_micro_batches=num_micro_batches, schedule=self._layout.schedule):
            stage = self._begin_stage(number)
            if kind == "forward":
                root = self._forward(micro_batches[index], loss_of)
                under_way[number, index] = weigh(root, index) if stage.is_last else root
                del root
                continue
            root = under_way.pop((number, index))
            begin_backward(is_last=index == num_micro_batches - 1)
            if stage.is_last:
                backward(root)
                total = root.detach() if total is None else total.add_(root.detach())
            else:
                mark_phase(self._meter, "backward")
                set_region(self._meter, "temporaries")
                torch.autograd.backward([root], [root.new_empty(0)])
            end_backward()
            del root
        self._end()
        return torch.zeros(()) if total is None else total

    def evaluate(self, micro_batches: Sequence[MicroBatch], *, loss_of: LossOf) -> list[float]:
        """The loss of each, on every rank; as many at a time as in a step. Raises RankLost."""
        losses: list[float] = []
        for first in range(0, len(micro_batches), self._num_micro_batches):
            together = micro_batches[first : first + self._num_micro_batches]
            self._link.begin(count_sent_at_once(self.own, num_micro_batches=len(together)))
            for stage in self.own.stages:
                self._begin_stage(stage.index)
                for micro_batch in together:
                    loss = self._forward(micro_batch, loss_of)
                    if stage is self.own.stages[-1]:
                        losses.append(float(loss) if stage.is_last else 0.0)
            self._end()
        return self._ranks.exchange(losses)[-1]

    def _begin_stage(self, number: int) -> StageOfModel:
        stage = self._running = self.own.stages[number // self.own.num_ranks]
        if self._visits is not None:
            self._visits.begin_stage(stage)
        return stage

    def _end(self) -> None:
        self._link.finish()
        if self._visits is not None:
            self._visits.end_stages()

    def _forward(self, micro_batch: MicroBatch, loss_of: LossOf) -> torch.Tensor:
        """The loss where the last stage runs; else what backward begins from."""
        try:
            return loss_of(micro_batch)
        except _StageEnded as ended:
            root = ended.root
        return root

    def _passing_over(self, forward: Callable[..., Any], index: int, *, in_tuple: bool) -> Callable[..., Any]:
        def pass_over(*args: Any, **kwargs: Any) -> Any:
            if self.runs(index):
                return forward(*args, **kwargs)
            hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
            if index == self._running.first_block - 1:
                hidden = _Arrive.apply(self._root, hidden.detach(), self._link)  # type: ignore[no-untyped-call]
            return (hidden,) if in_tuple else hidden

        return pass_over

    def _leave(self, stage: StageOfModel, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_alone and stage is self._running:
            root = _Leave.apply(hidden_state_of(output), self._link)  # type: ignore[no-untyped-call]
            self._leaving()
            raise _StageEnded(root)


class _Arrive(torch.autograd.Function):
    """From hidden states of the right shape to those of the stage before; their gradient goes there."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, like: torch.Tensor, link: PipelineLink) -> torch.Tensor:
        ctx.link = link
        hidden = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        link.receive_hidden(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.link.send_gradient(gradient)
        return None, None, None


class _Leave(torch.autograd.Function):
    """From the last hidden states of a stage to nothing; their gradient comes from the next stage."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, link: PipelineLink) -> torch.Tensor:
        ctx.link, ctx.shape, ctx.dtype, ctx.device = link, hidden.shape, hidden.dtype, hidden.device
        link.send_hidden(hidden)
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        ctx.link.receive_gradient(gradient)
        return gradient, None


class _StageEnded(Exception):
    """Ends a model's forward where the stage ends."""

    def __init__(self, root: torch.Tensor) -> None:
        super().__init__()
        self.root = root
