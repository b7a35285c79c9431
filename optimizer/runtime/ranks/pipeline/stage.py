"""One stage's part of a training step: the blocks of its own, beside the other stages, over several micro-batches under way.

Each stage runs the model's own forward. Blocks of other stages give their input back; the last before the stage's own gives what
came from the stage before, in a new tensor, as a block would. Behind its last block a stage sends its hidden states on and leaves
the forward by an exception. Backward begins there, with the gradient that the next stage sends, and ends where hidden states came
in, with what goes to the stage before.

Both ends are nodes of autograd's graph, which receive and send when autograd comes to them; so neither hidden states nor
gradients live longer than they would between two blocks of one device, but until they are taken (``link.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.formats.two_halves import RETURN_TUPLES
from optimizer.models.anatomy import Anatomy, hidden_state_of
from optimizer.plan.layout import DeviceLayout
from optimizer.plan.stages import list_turns
from optimizer.runtime.meter.meter import Meter, mark_phase, set_region
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.pipeline.keepers import require_decoder
from optimizer.runtime.ranks.pipeline.link import PipelineLink

MicroBatch = tuple[Any, ...]
"""The same as in ``runtime/step/micro_batch.py``."""
LossOf = Callable[[MicroBatch], torch.Tensor]


class PipelineStage:
    """The stage of one rank. Call ``watch`` once, after every other hook on the blocks is in place."""

    def __init__(self, ranks: Ranks, *, layout: DeviceLayout, anatomy: Anatomy, meter: Meter | None) -> None:
        """Raises InvalidModel for a model that cannot be cut."""
        require_decoder(anatomy)
        self.stage = layout.stages[ranks.rank]
        self._layout, self._anatomy, self._meter = layout, anatomy, meter
        self._ranks = ranks
        self._link = PipelineLink(ranks, self.stage)
        self._is_alone = False
        self._leaving: Callable[[], None] = lambda: None
        # Makes autograd follow hidden states that come from elsewhere.
        self._root = torch.empty(0, requires_grad=True)

    def watch(self, *, leaving: Callable[[], None]) -> tuple[list[RemovableHandle], Callable[[], None]]:
        """Take the place of other stages' blocks; returns hooks, and a function that gives the blocks their forwards back.

        leaving: is called where a stage leaves the forward before the model's end.
        """
        self._leaving = leaving
        blocks, handles = self._anatomy.blocks, []
        in_tuple = getattr(self._anatomy.model.config, "model_type", None) in RETURN_TUPLES
        others = [(index, block) for index, block in enumerate(blocks) if index not in self.stage.blocks]
        for index, block in others:
            block.forward = self._passing_over(block.forward, arrives=index == self.stage.first_block - 1, in_tuple=in_tuple)
        if not self.stage.is_last:
            handles.append(blocks[self.stage.blocks[-1]].register_forward_hook(self._leave))

        def undo() -> None:
            for _, block in others:
                del block.forward

        return handles, undo

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, this rank runs the whole model, whose other weights somebody brings."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

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
        """Forward and backward of all micro-batches; returns the sum of their losses as ``weigh`` weighs them, which the last
        stage has; a zero on the others. Raises RankLost.
        """
        under_way: dict[int, torch.Tensor] = {}
        total: torch.Tensor | None = None
        num_micro_batches = len(micro_batches)
        for turn, index in list_turns(self.stage, num_micro_batches=num_micro_batches, schedule=self._layout.schedule):
            if turn == "forward":
                root = self._forward(micro_batches[index], loss_of)
                under_way[index] = weigh(root, index) if self.stage.is_last else root
                del root
                continue
            root = under_way.pop(index)
            begin_backward(is_last=index == num_micro_batches - 1)
            if self.stage.is_last:
                backward(root)
                total = root.detach() if total is None else total.add_(root.detach())
            else:
                mark_phase(self._meter, "backward")
                set_region(self._meter, "temporaries")
                torch.autograd.backward([root], [root.new_empty(0)])
            end_backward()
            del root
        self._link.finish()
        return torch.zeros(()) if total is None else total

    def evaluate(self, micro_batches: Sequence[MicroBatch], *, loss_of: LossOf) -> list[float]:
        """The loss of each, on every stage. Raises RankLost."""
        losses = []
        for micro_batch in micro_batches:
            loss = self._forward(micro_batch, loss_of)
            losses.append(float(loss) if self.stage.is_last else 0.0)
        self._link.finish()
        return self._ranks.exchange(losses)[-1]

    def _forward(self, micro_batch: MicroBatch, loss_of: LossOf) -> torch.Tensor:
        """The loss on the last stage; on others what backward begins from."""
        try:
            return loss_of(micro_batch)
        except _StageEnded as ended:
            root = ended.root
        return root

    def _passing_over(self, forward: Callable[..., Any], *, arrives: bool, in_tuple: bool) -> Callable[..., Any]:
        def pass_over(*args: Any, **kwargs: Any) -> Any:
            if self._is_alone:
                return forward(*args, **kwargs)
            hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
            if arrives:
                hidden = _Arrive.apply(self._root, hidden.detach(), self._link)  # type: ignore[no-untyped-call]
            return (hidden,) if in_tuple else hidden

        return pass_over

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_alone:
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
