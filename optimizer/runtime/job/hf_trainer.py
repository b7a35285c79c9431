"""A plan under transformers' own ``Trainer``: an optimizer that carries the plan out, and a callback that checks and reports.

    with apply(model, plan, workload=workload, device=device, budget_bytes=budget) as run:
        trainer = Trainer(model, args, train_dataset=..., optimizers=(PlanOptimizer(run), None), callbacks=[PlanCallback(run)])
        trainer.train()

The optimizer clips as the workload says, since gradients may stand where the ``Trainer`` would not look for them; so
``max_grad_norm`` of its arguments must be 0, and mixed precision and gradient checkpointing are the plan's to decide.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optimizer.base.errors import InvalidPlan
from optimizer.runtime.job.apply import Applied

_STATE_KEY = "headroom"


class PlanOptimizer(torch.optim.Optimizer):
    """Looks like an optimizer of torch's, so that learning-rate schedules and checkpoints work; the plan does the work."""

    def __init__(self, run: Applied) -> None:
        self._run = run
        trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        super().__init__(trained, {"lr": run.workload.learning_rate})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip, update and drop the gradients of the micro-batches since the last step."""
        if closure is not None:
            raise ValueError("a plan's optimizer takes no closure: backward has run when it is called")
        self._run.step(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 torch's signature
        """Nothing: ``step`` drops the gradients, wherever they are."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _STATE_KEY: self._run.export_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self._run.import_state(state.pop(_STATE_KEY))
        super().load_state_dict(state)


class PlanCallback(TrainerCallback):
    """Refuses arguments that contradict the plan, and adds what was counted to the logs.

    Logged beside the ``Trainer``'s own: ``grad_norm`` (before clipping), and with a budget ``device_peak_bytes`` and
    ``host_peak_bytes`` since the log before.
    """

    def __init__(self, run: Applied) -> None:
        self._run = run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises InvalidPlan."""
        batch = self._run.plan.batch
        _require("per_device_train_batch_size", args.per_device_train_batch_size, batch.micro_batch_size)
        _require("gradient_accumulation_steps", args.gradient_accumulation_steps, batch.accumulation_steps)
        _require("max_grad_norm", args.max_grad_norm or 0, 0)
        _require("gradient_checkpointing", bool(args.gradient_checkpointing), False)  # noqa: FBT003
        _require("bf16", args.bf16, False)  # noqa: FBT003
        _require("fp16", args.fp16, False)  # noqa: FBT003
        if self._run.plan.weights.place != "device":
            # Between uses a streamed block's tensors are empty, and the Trainer saves the model itself.
            _require("save_strategy", str(getattr(args.save_strategy, "value", args.save_strategy)), "no")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or self._run.last_step is None:
            return
        counted: dict[str, Any] = {"grad_norm": self._run.last_step.grad_norm}
        if self._run.is_counted:
            peak = self._run.peak()
            counted |= {"device_peak_bytes": peak.device_bytes, "host_peak_bytes": peak.host_bytes}
            self._run.reset_peak()
        logs |= counted
        if state.log_history:
            # The Trainer has put its copy there before it calls anyone.
            state.log_history[-1] |= counted

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.join()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.join()


def _require(name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise InvalidPlan(
            f"TrainingArguments.{name} is {found}; under this plan it must be {wanted}",
            field=f"TrainingArguments.{name}",
            value=found,
            allowed=wanted,
            hint="The plan decides batch, precision, recomputation and clipping; set the arguments to match it.",
        )
