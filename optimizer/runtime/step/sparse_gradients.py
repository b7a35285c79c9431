"""Gradients of embeddings that hold only the rows of a batch's tokens, and the update that touches only those rows.

``nn.Embedding(sparse=True)`` gives a gradient of indices and values: a row for each token of the micro-batch, duplicates not
summed. Autograd takes both without a copy, the values as a view of the hidden states' gradient.

Between backward and the update, for a table of rows of h elements and m micro-batches of n tokens:

- After each micro-batch its n rows are put aside (``n * (4h + 8)`` bytes, as gradients). Were they left in ``param.grad``,
  autograd would copy all rows so far in each further micro-batch.
- Before clipping they are joined, where there are several micro-batches, and rows of the same token are summed, so that the norm
  and what is clipped are those of the dense gradient. Each of the two makes ``m * n * (4h + 8)`` bytes anew and lets the old go.
- The update makes three tensors of the rows touched, at most ``m * n`` and at most the table's.

The update is **lazy AdamW**, which is another algorithm than AdamW: for each row r that some token of the step has, with the
summed and clipped gradient g, the step t counted over the whole run from 1, and learning rate, betas, epsilon and decay of the
workload,

    w[r] <- w[r] * (1 - lr * decay)
    m[r] <- beta1 * m[r] + (1 - beta1) * g
    v[r] <- beta2 * v[r] + (1 - beta2) * g * g
    w[r] <- w[r] - lr * (m[r] / (1 - beta1 ** t)) / (sqrt(v[r] / (1 - beta2 ** t)) + epsilon)

and no other row changes in any of w, m and v: AdamW would decay each of them, and go on moving weights by old moments. A row
seen for the first time at step t is corrected for bias as if it had been seen in all t steps. Where every row is touched in every
step it is AdamW, to the bit. Moments are dense fp32, so that a checkpoint holds what AdamW's does.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from optimizer.base.errors import CheckpointInvalid
from optimizer.runtime.meter.meter import Meter
from optimizer.workload import TrainingWorkload

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


def find_sparse(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained tables whose gradients are sparse, by name."""
    ids = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.sparse and module.weight.requires_grad
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids}


class SparseGradients:
    """The rows of each micro-batch, until they are joined."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, meter: Meter | None = None) -> None:
        self._parameters = parameters
        self._meter = meter
        self._rows: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}

    def watch(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._put_aside, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]

    @torch.no_grad()
    def join(self) -> None:
        """Make ``param.grad`` of what was put aside, each row once."""
        for name, parameter in self._parameters.items():
            rows, self._rows[name] = self._rows[name], []
            if rows:
                with nullcontext() if self._meter is None else self._meter.region("gradients"):
                    parameter.grad = _join(rows).coalesce()

    def clear(self) -> None:
        """Forget what was put aside."""
        for rows in self._rows.values():
            rows.clear()

    def _put_aside(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._rows[name].append(parameter.grad)
            parameter.grad = None


def _join(rows: list[torch.Tensor]) -> torch.Tensor:
    """Empties the list, so that what is joined can go."""
    if len(rows) == 1:
        return rows.pop()
    indices = torch.cat([part._indices() for part in rows], dim=1)
    values = torch.cat([part._values() for part in rows])
    shape = rows[0].shape
    rows.clear()
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


class LazyAdamW:
    """Updates the rows touched; all other rows keep their weights and moments."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, workload: TrainingWorkload) -> None:
        self._parameters = parameters
        self._workload = workload
        self._states: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._parameters)

    def begin(self) -> None:
        """Make the moments of tensors that have a first gradient."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not self._states.get(name):
                self._begin(name)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """After ``begin``. One update from ``param.grad``, each row of it once."""
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                self._update(parameter, gradient, self._states[name], learning_rate)

    def export(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """``(name, what, tensor)`` of all that is kept between steps."""
        for name, state in self._states.items():
            for key, tensor in state.items():
                yield name, key, tensor

    def set(self, name: str, key: str, value: torch.Tensor) -> None:
        """Undo ``export`` of one tensor. Raises CheckpointInvalid for what this algorithm does not keep."""
        parameter = self._parameters[name]
        expected = {_STEP: torch.Size(()), **dict.fromkeys(_MOMENTS, parameter.shape)}
        if key not in expected or not isinstance(value, torch.Tensor) or value.shape != expected[key]:
            raise CheckpointInvalid(f"optimizer state {name}//{key} is not what an embedding's rows are updated with")
        self._states.setdefault(name, {})[key] = value.to(parameter.device, copy=True)

    def _begin(self, name: str) -> None:
        parameter, state = self._parameters[name], self._states.setdefault(name, {})
        state[_STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for key in _MOMENTS:
            state[key] = torch.zeros_like(parameter)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], learning_rate: float
    ) -> None:
        indices = gradient._indices()[0]
        tables = (parameter, *(state[key] for key in _MOMENTS))
        weight, mean, square = (table.index_select(0, indices) for table in tables)
        # torch's own fused kernel on the rows alone.
        adamw(
            [weight],
            [gradient._values()],
            [mean],
            [square],
            [],
            [state[_STEP]],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=self._workload.beta1,
            beta2=self._workload.beta2,
            lr=learning_rate,
            weight_decay=self._workload.weight_decay,
            eps=self._workload.epsilon,
            maximize=False,
        )
        for table, rows in zip(tables, (weight, mean, square), strict=True):
            table.index_copy_(0, indices, rows)
