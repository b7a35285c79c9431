"""The model's forward as far as the loss, which marks moments and regions for the meter on its way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from optimizer.base.errors import OutOfMemory
from optimizer.models.anatomy import Anatomy
from optimizer.plan.plan import Plan
from optimizer.runtime.meter.meter import Meter, mark_phase, set_region
from optimizer.runtime.step.logits_and_loss import compute_loss
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.precision import Precision
from optimizer.runtime.step.preference import Preference, as_reference, score_rows
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.workload import TrainingWorkload

HEAD_BACKWARD: Final = "backward of head and loss"


class Forward:
    """Losses of micro-batches under one plan, in training and in evaluation alike.

    preference: None but in preference training. is_trace: True where tensors have no numbers; the scores of the reference are
    zeros then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        anatomy: Anatomy,
        plan: Plan,
        workload: TrainingWorkload,
        device: torch.device,
        meter: Meter | None,
        precision: Precision,
        preference: Preference | None,
        tiers: Tiers,
        is_trace: bool,
    ) -> None:
        self.model, self._anatomy = model, anatomy
        self._plan, self._workload = plan, workload
        self._device, self.meter = device, meter
        self._precision, self._preference = precision, preference
        self._tiers = tiers
        self._is_trace = is_trace

    def loss_of(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Mean loss over the tokens of a micro-batch that count, in the graph."""
        ids, labels, *more = micro_batch
        if more and self._workload.is_packed:
            return self.compute_loss(ids, labels, position_ids=more[0])
        return self.compute_loss(ids, labels, attention_mask=more[0] if more else None)

    def compute_loss(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mean loss over the tokens that count, in the graph.

        Leaves the meter in the region of the head and the loss, where backward begins. attention_mask: [batch, sequence], of
        padded sequences. position_ids: [batch, sequence], of packed samples; attention is cut where they start over.
        """
        mark_phase(self.meter, "forward")
        set_region(self.meter, "temporaries")
        ids, labels = self._bring(ids), self._bring(labels)
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        masks = {name: self._bring(tensor) for name, tensor in given.items() if tensor is not None}
        reference = self._score_reference(ids, labels)
        set_region(self.meter, "activations")
        with self._precision.autocast():
            result = self._anatomy.run(ids, labels=labels, masks=masks, at_hidden=self._backbone_ends)
            if self._preference is not None:
                scores = score_rows(self._anatomy.compute_logits(result), labels)
                return self._preference.loss(scores, labels, reference=reference)
            return compute_loss(self._anatomy, result, labels, plan=self._plan.logits_and_loss)

    def _score_reference(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Scores of the rows under the model without its adapters; None where no reference is asked for."""
        if self._preference is None or not self._preference.has_reference:
            return None
        if self._is_trace:
            return ids.new_zeros(len(ids), dtype=torch.float32)
        mark_phase(self.meter, "reference")
        set_region(self.meter, "activations")
        with _in_reference(), torch.no_grad(), as_reference(self.model), self._precision.autocast():
            result = self._anatomy.run(ids, labels=labels, masks={}, at_hidden=self._backbone_ends)
            scores = score_rows(self._anatomy.compute_logits(result), labels)
        if self.meter is not None:
            self.meter.assign(scores, "temporaries")
        mark_phase(self.meter, "forward")
        return scores

    def _bring(self, given: Any) -> Any:
        """A tensor, or each of a tuple, on the device and counted."""
        if isinstance(given, tuple):
            return tuple(self._bring(each) for each in given)
        tensor: torch.Tensor = given.to(self._device, non_blocking=True)
        if self.meter is not None:
            self.meter.assign(tensor, "temporaries")
        return tensor

    def _backbone_ends(self, hidden: torch.Tensor) -> None:
        # Before the largest tensors of the step: what blocks have offloaded is let go.
        self._tiers.settle()
        mark_phase(self.meter, "head and loss")
        set_region(self.meter, "logits_and_loss")
        if hidden.requires_grad and self.meter is not None:
            hidden.register_hook(self._backbone_backward_begins)  # type: ignore[no-untyped-call]

    def _backbone_backward_begins(self, gradient: torch.Tensor) -> None:
        # Where no norm follows the last block, its own hook was on the same tensor, and has said that its backward begins.
        if self.meter is not None and self.meter.moment == HEAD_BACKWARD:
            mark_phase(self.meter, "backward")
        set_region(self.meter, "temporaries")


@contextmanager
def _in_reference() -> Iterator[None]:
    """Note on an out-of-memory that it came in the reference's forward, whose moments have the names of any forward's."""
    try:
        yield
    except OutOfMemory as error:
        error.fields["is_reference"] = True
        raise
