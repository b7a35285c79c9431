"""A plan around a person's own training loop: ``with apply(model, plan, workload=...) as run``.

The loop stays the caller's: where batches come from, how often, what is logged. The plan sees to the rest, by hooks on the
model and on the loss, so that ``loss.backward()`` is all that backward needs:

    with apply(model, plan, workload=workload, device="cuda", budget_bytes=8 * GIB) as run:
        for ids, labels in batches:
            loss = run.compute_loss(ids, labels)
            loss.backward()
            run.step(learning_rate)

or, since the model's own forward is wrapped too, ``model(input_ids=ids, labels=ids).loss``. For transformers' ``Trainer`` see
``hf_trainer.py``. A model whose blocks are to stream must stand in host memory when it comes in, and does so when it leaves.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.base.errors import InvalidPlan
from optimizer.data.batches import IGNORED_LABEL
from optimizer.models.anatomy import Anatomy
from optimizer.plan.plan import Plan
from optimizer.runtime.meter.device import check_dtype, prepared_device
from optimizer.runtime.meter.meter import Meter, Peak, check_peak
from optimizer.runtime.step.allocator import apply_allocator
from optimizer.runtime.step.step import StepResult, Trainer
from optimizer.workload import TrainingWorkload


@contextmanager
def apply(
    model: nn.Module,
    plan: Plan,
    *,
    workload: TrainingWorkload,
    device: str | torch.device = "cpu",
    budget_bytes: int | None = None,
    scratch: Path | None = None,
    anatomy: Anatomy | None = None,
) -> Iterator["Applied"]:
    """Carry the plan out on ``model`` for the length of the block; afterwards the model is as it was, with new weights.

    model: a causal language model of transformers or of ``build_model``, with adapters and packed weights already in place
    (``prepare.prepare_model``) where the workload asks for them. workload: what the plan was made for; of it count the batch,
    the optimizer's settings and the clipping. budget_bytes: None counts nothing and costs nothing; else all that is allocated
    inside the block is counted, and OutOfDeviceMemory raised over it. scratch: folder for what goes to the disk. anatomy: of a
    module that is no language model (``plain_anatomy``), whose loss is made by ``run.compute_loss(inputs, labels)``.

    Raises InvalidPlan where the plan does not suit the model, the workload or the device.
    """
    device = torch.device(device)
    apply_allocator(plan.allocator, device)
    with prepared_device(device):
        check_dtype(plan.weights, device)
        meter = None if budget_bytes is None else Meter(device=device, cap_bytes=budget_bytes)
        trainer = Trainer(
            model, plan=plan, workload=workload, device=device, meter=meter, scratch=scratch, anatomy=anatomy
        )
        run = Applied(trainer)
        if anatomy is None:
            model.forward = _with_planned_loss(model.forward, run)
        is_done = False
        try:
            with trainer.metered():
                yield run
            is_done = True
        finally:
            if anatomy is None:
                del model.forward
            # After an error updates under way may have failed too; it is the first error that is to be seen.
            trainer.close(keep_weights=is_done)


class Applied:
    """The object that the loop calls."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._total: torch.Tensor | None = None
        self._num_losses = 0
        self.last_step: StepResult | None = None

    @property
    def model(self) -> nn.Module:
        return self._trainer.model

    @property
    def plan(self) -> Plan:
        return self._trainer.plan

    @property
    def workload(self) -> TrainingWorkload:
        return self._trainer.workload

    def compute_loss(
        self, ids: torch.Tensor, labels: torch.Tensor, *, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Mean cross-entropy over the tokens whose label is not -100; its ``backward`` does all that the plan asks for.

        Raises InvalidPlan for more micro-batches in a step than the plan has.

        ids and labels: [batch, sequence], on any device; labels are the next tokens, already shifted. Where a step has several
        micro-batches, divide by their number before backward, as in any loop.
        """
        loss = self._trainer.forward.compute_loss(ids, labels, attention_mask=attention_mask)
        if not loss.requires_grad:
            return loss
        allowed = self.plan.batch.accumulation_steps
        if self._num_losses >= allowed:
            raise InvalidPlan(
                f"the plan makes a step of {allowed} micro-batch{'es' if allowed > 1 else ''}; one more was begun before "
                "step was called",
                field="plan.batch.accumulation_steps",
                value=self._num_losses + 1,
                allowed=allowed,
            )
        self._total = loss.detach() if self._total is None else self._total + loss.detach()
        self._num_losses += 1
        loss.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return loss

    def step(self, learning_rate: float | None = None) -> StepResult:
        """Clip as the workload says, update, drop the gradients. The step's losses so far are taken as its micro-batches.

        learning_rate: the workload's unless given. Raises LossNotFinite before the weights are touched,
        OutOfDeviceMemory for a peak over the budget.
        """
        if self._total is None:
            raise ValueError("step was called before any loss was made")
        rate = self._trainer.workload.learning_rate if learning_rate is None else learning_rate
        loss, self._total = self._total / self._num_losses, None
        self._num_losses = 0
        self.last_step = self._trainer.update(loss, learning_rate=rate)
        check_peak(self._trainer.meter)
        # What consumes gradients in backward updates with the rate that is set before it.
        self._trainer.optimizer.learning_rate = rate
        return self.last_step

    @property
    def is_counted(self) -> bool:
        """True if there is a budget, and so a count."""
        return self._trainer.meter is not None

    def peak(self) -> Peak:
        """Most bytes since the block was entered, or since the last ``reset_peak``. Raises ValueError without a budget."""
        return self._meter().peak()

    def reset_peak(self) -> None:
        self._meter().reset_peak()

    def export_state(self) -> dict[str, Any]:
        """The optimizer's state as tensors on the host and numbers, by name, and the loss scale: for a checkpoint."""
        self.join()
        tensors, scalars = self._trainer.optimizer.export_state()
        copies = {
            name: (tensor.detach() if isinstance(tensor, torch.Tensor) else tensor.load()).to("cpu", copy=True)
            for name, tensor in tensors.items()
        }
        return {"tensors": copies, "scalars": scalars, "precision": self._trainer.precision.export_state()}

    def import_state(self, state: dict[str, Any]) -> None:
        """Undo ``export_state``, after the model's weights were restored. Raises CheckpointInvalid where it is of another model
        or representation.
        """
        self.join()
        # Where updates run on the host, weights have a second home there.
        self._trainer.set_weights(
            {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad and p.untyped_storage().nbytes()}
        )
        self._trainer.optimizer.import_state(state["tensors"], state["scalars"])
        self._trainer.precision.import_state(state["precision"])
        self._trainer.assign_optimizer_state()

    def join(self) -> None:
        """Wait for updates that run beside compute: before weights are read, saved or compared."""
        self._trainer.join()

    def _meter(self) -> Meter:
        if self._trainer.meter is None:
            raise ValueError("nothing was counted: apply was called without budget_bytes")
        return self._trainer.meter

    def _begin_backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        # Which micro-batch is the last of a step is known only when ``step`` is called, so no update begins before.
        self._trainer.begin_backward(is_last=False)
        torch.autograd.Variable._execution_engine.queue_callback(self._trainer.end_backward)
        scale = self._trainer.precision.scale
        return None if scale == 1.0 else gradient * scale


def _with_planned_loss(forward: Callable[..., Any], run: Applied) -> Callable[..., Any]:
    """The model's forward; given labels it makes the loss as the plan says, and no logits.

    As transformers' models do it: labels are the ids themselves, shifted here; ``num_items_in_batch`` counts the tokens that
    the whole step's loss is a mean over.
    """

    @functools.wraps(forward)
    def planned(
        input_ids: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **others: Any,
    ) -> Any:
        if labels is None or input_ids is None:
            return forward(input_ids, attention_mask=attention_mask, **others)
        from transformers.modeling_outputs import CausalLMOutput

        shifted = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:].contiguous()
        loss = run.compute_loss(input_ids, shifted, attention_mask=attention_mask)
        if num_items_in_batch is not None:
            loss = loss * ((shifted != IGNORED_LABEL).sum().to(loss.device) / num_items_in_batch)
        return CausalLMOutput(loss=loss)

    return planned
