"""Defines one update of a weight: AdamW or SGD by torch's fused kernels, Lion by plain ones, on the device and on the host;
Adafactor on the device.

adamw   decoupled weight decay, two moments (``exp_avg``, ``exp_avg_sq``) and a count of steps, of each tensor.
sgd     weight decay is added to the gradient, as torch's SGD does; with momentum one moment (``momentum_buffer``), which
        begins as zeros: m <- momentum * m + g, w <- w - lr * m. Without momentum nothing is kept. Not Nesterov's.
lion    decoupled weight decay, one moment (``exp_avg``): c <- beta1 * m + (1 - beta1) * g, w <- w - lr * sign(c),
        m <- beta2 * m + (1 - beta2) * g. Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675).

The fused kernels allocate nothing but the state, and give the bits of the whole where a tensor is cut at multiples of 16. Lion's
hold c, of a piece of ``PIECE_ELEMENTS`` at a time. Adafactor is ``adafactor.py``'s.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from optimizer.base.optional import load_bitsandbytes
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.runtime.updates.adafactor import Adafactor
from optimizer.workload import TrainingWorkload

MOMENTUM = "momentum_buffer"
_ADAMW_8BIT_KEYS = ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2")


class Piece(NamedTuple):
    """A tensor, or a part of one, that is updated at once: flat fp32 tensors of as many numbers."""

    weight: torch.Tensor
    gradient: torch.Tensor
    moments: list[torch.Tensor]
    learning_rate: float
    weight_decay: float
    num_steps: torch.Tensor | None = None
    """Counts this update already."""
    scratch: torch.Tensor | None = None
    """Room for the copy that some rules need; made unless given."""


class UpdateRule(Protocol):
    """The update rule of one run, with its numbers."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names under which torch's optimizer keeps them."""

    @property
    def counts_steps(self) -> bool:
        """True if each tensor's updates are counted."""

    @property
    def holds_copy(self) -> bool:
        """True if an update needs a copy of as many fp32 numbers as it is of."""

    @property
    def known_keys(self) -> frozenset[str]:
        """All that a checkpoint can hold of a tensor's state, beside its master weights."""

    def update(self, piece: Piece) -> None:
        """Update the weight and the moments in place."""


def rule_of(workload: TrainingWorkload) -> UpdateRule:
    rules: dict[str, Callable[[TrainingWorkload], UpdateRule]] = {
        "adamw": _AdamW,
        "sgd": _SGD,
        "lion": _Lion,
        "adafactor": _FactoredOnDevice,
    }
    return rules[workload.optimizer](workload)


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, plan: OptimizerStatePlan, workload: TrainingWorkload
) -> torch.optim.Optimizer:
    """Make the optimizer of state that stays where the parameters are. Raises MissingExtra without bitsandbytes, for 8 bits."""
    groups = _decay_groups(parameters, workload.weight_decay)
    if workload.optimizer == "sgd":
        return _MomentumSGD(groups, lr=workload.learning_rate, momentum=workload.momentum, fused=True)
    if workload.optimizer == "lion":
        return _LionOptimizer(groups, rule=_Lion(workload), learning_rate=workload.learning_rate)
    if workload.optimizer == "adafactor":
        return Adafactor(groups, lr=workload.learning_rate, foreach=False)
    betas = (workload.beta1, workload.beta2)
    if plan.bits == 32:
        return torch.optim.AdamW(groups, lr=workload.learning_rate, betas=betas, eps=workload.epsilon, fused=True)
    load_bitsandbytes(needed_for="optimizer state in 8 bits")
    from optimizer.runtime.updates.adamw_8bit import PiecewiseAdamW8bit

    adamw_8bit: Any = PiecewiseAdamW8bit
    optimizer: torch.optim.Optimizer = adamw_8bit(groups, lr=workload.learning_rate, betas=betas, eps=workload.epsilon)
    return optimizer


class _AdamW:
    moments = ("exp_avg", "exp_avg_sq")
    counts_steps = True
    holds_copy = False
    known_keys = frozenset({*moments, "step", *_ADAMW_8BIT_KEYS})

    def __init__(self, workload: TrainingWorkload) -> None:
        self._workload = workload

    def update(self, piece: Piece) -> None:
        assert piece.num_steps is not None
        exp_avg, exp_avg_sq = piece.moments
        torch._fused_adamw_(
            [piece.weight],
            [piece.gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [piece.num_steps],
            lr=piece.learning_rate,
            beta1=self._workload.beta1,
            beta2=self._workload.beta2,
            weight_decay=piece.weight_decay,
            eps=self._workload.epsilon,
            amsgrad=False,
            maximize=False,
        )


class _SGD:
    counts_steps = False
    holds_copy = False

    def __init__(self, workload: TrainingWorkload) -> None:
        self._momentum = workload.momentum
        self.moments: tuple[str, ...] = (MOMENTUM,) if workload.momentum > 0 else ()
        self.known_keys = frozenset(self.moments)

    def update(self, piece: Piece) -> None:
        torch._fused_sgd_(
            [piece.weight],
            [piece.gradient],
            piece.moments,
            weight_decay=piece.weight_decay,
            momentum=self._momentum,
            lr=piece.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class _Lion:
    moments = ("exp_avg",)
    counts_steps = False
    holds_copy = True
    known_keys = frozenset(moments)

    def __init__(self, workload: TrainingWorkload) -> None:
        self._beta1, self._beta2 = workload.beta1, workload.beta2

    def update(self, piece: Piece) -> None:
        (moment,), weight = piece.moments, piece.weight
        mixed = torch.empty_like(weight) if piece.scratch is None else piece.scratch[: weight.numel()]
        torch.lerp(piece.gradient, moment, self._beta1, out=mixed)
        weight.mul_(1 - piece.learning_rate * piece.weight_decay).add_(mixed.sign_(), alpha=-piece.learning_rate)
        moment.lerp_(piece.gradient, 1 - self._beta2)


class _FactoredOnDevice:
    """The parts of Adafactor's state that a checkpoint can hold; its update needs whole tensors (``adafactor.py``)."""

    moments = ()
    counts_steps = True
    holds_copy = False
    known_keys = frozenset({"step", "row_var", "col_var", "variance"})

    def __init__(self, workload: TrainingWorkload) -> None:
        pass

    def update(self, piece: Piece) -> None:
        raise NotImplementedError("Adafactor updates whole tensors, on the device")


class _LionOptimizer(torch.optim.Optimizer):
    """Lion where the parameters are, piece by piece."""

    def __init__(self, groups: list[dict[str, Any]], *, rule: _Lion, learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate})
        self._rule = rule

    def make_state(self) -> None:
        """Make the moments of tensors that have a first gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """After ``make_state``."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                wholes = (parameter, parameter.grad.contiguous(), self.state[parameter]["exp_avg"])
                for weight, gradient, moment in zip(*(w.view(-1).split(PIECE_ELEMENTS) for w in wholes), strict=True):
                    self._rule.update(Piece(weight, gradient, [moment], group["lr"], group["weight_decay"]))


class _MomentumSGD(torch.optim.SGD):
    """With a moment that begins as zeros, tensor by tensor: torch's fused one cannot take up a tensor whose first gradient
    comes later than the others'.
    """

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                state = self.state[parameter]
                if parameter.grad is not None and MOMENTUM not in state:
                    state[MOMENTUM] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return super().step(closure)


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices and embeddings only: norms and biases are not shrunk."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if parameter.dim() >= 2 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
