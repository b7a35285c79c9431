"""Carries out the optimizer-state row of a plan: AdamW or SGD with moments in 32 bits, AdamW in 8, on the device, the host or
the disk.

32 bits is torch's fused AdamW or SGD, which allocate nothing but their state; 8 bits is bitsandbytes' block-wise AdamW
(tensors under 4096 elements stay in 32 bits): ``update_rule.py``. With weights below fp32 each parameter is stepped by itself,
so the fp32 copy of a gradient exists for one parameter at a time. Tensors whose state leaves the device (``split_state``) are
``host_update.py``'s, embeddings with sparse gradients ``sparse_gradients.py``'s.

What an update of tensors whose state stayed allocates on the device, tensor by tensor, matrices before the rest:

gradients on the device   fp32 weights: nothing. Below: the fp32 gradient (4n, temporaries), the gradient goes, the update,
                          the fp32 gradient goes. Without masters: the same, with an fp32 copy of the weight (4n) from before
                          the update until it is rounded, with its random bits (2 bytes an element, of a piece at most).
gradients on the host     as above, but in the model's order, and each gradient first comes back (n in its dtype, as
                          gradients; host to device) and goes after its update, also for fp32 weights.
gradients consumed        as the first, inside backward, when the gradient of the tensor is complete.

On the CPU device each update in 8 bits also holds what ``update_scratch_bytes`` says, while it runs.

Also here: the learning rate.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.base.errors import CheckpointInvalid
from optimizer.plan.optimizer_state import MIN_8BIT_ELEMENTS, OptimizerStatePlan, split_state
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.step.gradients import HostGradients
from optimizer.runtime.step.host_update import MASTER, GradientOf, HostState, UpdateFacts
from optimizer.runtime.step.sparse_gradients import LazyAdamW, find_sparse
from optimizer.runtime.tiers.background_thread import BackgroundThread
from optimizer.runtime.tiers.homes import HomeTensor, OffDeviceBytes
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.runtime.updates.stochastic_rounding import NUM_ROUNDINGS, StochasticRounding
from optimizer.runtime.updates.update_rule import make_optimizer, rule_of
from optimizer.workload import TrainingWorkload

FINAL_LEARNING_RATE_FRACTION = 0.1
"""Linear and cosine schedules end at this fraction of the peak, at the last step."""

_CONSTANT_MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""bitsandbytes' tables of 8-bit values: the same for every parameter, so never written to a checkpoint."""

StateTensors = Mapping[str, torch.Tensor | HomeTensor]
StateScalars = dict[str, int | float]


def learning_rate_at(step: int, workload: TrainingWorkload) -> float:
    """Learning rate of the optimizer step with this index, counted from 0; a pure function."""
    if step < workload.warmup_steps:
        return workload.learning_rate * (step + 1) / workload.warmup_steps
    if workload.schedule == "constant":
        return workload.learning_rate
    num_after_warmup = workload.num_steps - workload.warmup_steps
    progress = min(1.0, (step - workload.warmup_steps) / max(1, num_after_warmup - 1))
    remaining = 1 - progress if workload.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    fraction = FINAL_LEARNING_RATE_FRACTION + (1 - FINAL_LEARNING_RATE_FRACTION) * remaining
    return workload.learning_rate * fraction


class Optimizer:
    """The workload's optimizer over a model's trained parameters, by name, with the state the plan asks for.

    weights: the plan's; unless given, what the parameters' dtypes ask for. tiers: needed where state leaves the device.
    home_of: of weights that stream. is_threaded: updates on the host run on a thread of their own; ``wait`` or ``require`` a
    tensor, or ``join`` all, before its new weights are used.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: OptimizerStatePlan,
        workload: TrainingWorkload,
        weights: WeightsPlan | None = None,
        tiers: Tiers | None = None,
        home_of: Callable[[str], OffDeviceBytes | None] = lambda name: None,
        worker: BackgroundThread | None = None,
        is_owned: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """is_owned: says of a trained tensor by name whether this rank updates it; the others have no state here."""
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad and is_owned(name)}
        self._meter = None if tiers is None else tiers.meter
        leaves = split_state(plan, [p.numel() for p in self._named.values()])
        leaving = {name: p for (name, p), left in zip(self._named.items(), leaves, strict=True) if left}
        sparse = find_sparse(model)
        self._lazy = LazyAdamW(sparse, workload=workload)
        self._known_keys = {MASTER, *rule_of(workload).known_keys}
        staying = {name: p for name, p in self._named.items() if name not in leaving and name not in sparse}
        has_masters = weights is None or weights.master_bytes_per_element > 0
        self._masters = {
            name: nn.Parameter(p.detach().to(torch.float32))
            for name, p in staying.items()
            if has_masters and p.dtype != torch.float32
        }
        self._steps_alone = bool(self._masters) or workload.kept_state.declared.steps_alone
        self._rounding: StochasticRounding | None = None
        self._on_host_rounding: StochasticRounding | None = None
        if weights is not None and weights.master == "none":
            self._steps_alone = True
            self._known_keys = {NUM_ROUNDINGS, *self._known_keys} - {MASTER}
            device = next(iter(self._named.values())).device if tiers is None else tiers.device
            self._rounding = StochasticRounding(seed=workload.seed, device=device)
        self._stepped = {name: self._stepped_for(name, p) for name, p in staying.items()}
        self._parameter_of: dict[torch.Tensor, nn.Parameter] = {
            stepped: self._named[name] for name, stepped in self._stepped.items()
        }
        self._name_of = {parameter: name for name, parameter in staying.items()}
        self._inner: torch.optim.Optimizer | None = None
        if staying:
            with self._makes_state():
                self._inner = make_optimizer(self._stepped.values(), plan=plan, workload=workload)
        groups = [] if self._inner is None else self._inner.param_groups
        self._group_of = {stepped: group for group in groups for stepped in group["params"]}
        self.on_host: HostState | None = None
        if leaving:
            if tiers is None:
                raise ValueError("optimizer state that leaves the device needs tiers to go to")
            if self._rounding is not None:
                self._on_host_rounding = StochasticRounding(seed=workload.seed, device=torch.device("cpu"))
            self.on_host = HostState(
                leaving, plan=plan, workload=workload, tiers=tiers, home_of=home_of, rounding=self._on_host_rounding
            )
        self._worker = worker
        self.learning_rate = workload.learning_rate
        """Learning rate of the step under way; ``step`` sets it, tensors that are stepped one by one during backward
        need it before."""

    def step(
        self,
        learning_rate: float,
        *,
        grad_factor: torch.Tensor | None = None,
        host_gradients: HostGradients | None = None,
    ) -> None:
        """One update, from ``param.grad`` or from gradients on the host; those on the device stay until ``zero_grad``, except
        those of weights below fp32.

        grad_factor: what gradients are still to be multiplied by: fp32 copies of those on the device, all on the host.
        """
        self.learning_rate = learning_rate
        with self._makes_state():
            self._lazy.begin()
        self._lazy.step(learning_rate)
        if host_gradients is not None:
            self._step_from_host(host_gradients, grad_factor)
        elif not self._steps_alone and self._inner is not None:
            for group in self._inner.param_groups:
                group["lr"] = learning_rate
            self._run_inner(self._inner)
        else:
            for stepped in self._group_of:
                self._step_one(stepped, grad_factor)

    def step_one(self, name: str, *, grad_factor: torch.Tensor | None = None) -> None:
        """Update one tensor, whose state is on the device, from its ``grad``."""
        self._step_one(self._stepped[name], grad_factor)

    def begin_update(self, name: str) -> bool:
        """Report whether the tensor's state left; from now on who asks for it waits for the ``update`` that follows."""
        if not self._is_on_host(name):
            return False
        self.on_host.begin([name])  # type: ignore[union-attr]
        return True

    def update(self, name: str, gradient_of: GradientOf) -> None:
        """Update one tensor whose state left, from a gradient that needs no scaling. Raises what ``gradient_of`` raises; who
        waits for the tensor then raises it too.
        """
        assert self.on_host is not None
        facts = UpdateFacts(learning_rate=self.learning_rate, grad_factor=None)
        self.on_host.run([name], gradient_of, facts)

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    # Updates under way.

    def watch(
        self,
        model: nn.Module,
        *,
        blocks: Sequence[nn.Module],
        backbone: nn.Module,
        runs: Callable[[int], bool] | None = None,
    ) -> list[RemovableHandle]:
        """Have each part of the model wait for its own new weights, where a thread makes them.

        runs: whether a block's forward is what runs when it is called, by its number; of a model that is cut.
        """
        if self.on_host is None or self._worker is None or not self._worker.is_threaded:
            return []
        names = {id(p): name for name, p in self._named.items()}
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        handles: list[RemovableHandle] = []
        for module in model.modules():
            if id(module) not in in_blocks:
                own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
                handles.append(module.register_forward_pre_hook(partial(self._require, own)))
        for index, block in enumerate(blocks):
            own = [names[id(p)] for p in block.parameters() if id(p) in names]
            asked = None if runs is None else partial(runs, index)
            handles.append(block.register_forward_pre_hook(partial(self._require, own, asked=asked)))
        # The head's module may never be called: chunks use its weight alone.
        handles.append(backbone.register_forward_hook(partial(self._require, list(self._named))))
        return handles

    def is_updated(self, name: str) -> bool:
        """Report whether the newest update of a tensor is done; always so where the device updates."""
        return self.on_host is None or self.on_host.is_updated(name)

    def wait(self, name: str) -> None:
        """Until the newest update of a tensor is done on the host; raises what it met."""
        if self.on_host is not None:
            self.on_host.wait(name)

    def require(self, name: str) -> None:
        """Until compute that is queued from here on finds the tensor's new weights."""
        if self.on_host is not None:
            self.on_host.require(name)

    def join(self) -> None:
        """Wait for all updates under way; raises what they met."""
        if self.on_host is not None:
            self.on_host.settle()

    # Checkpoints.

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor kept on the device between steps, master weights included."""
        yield from self._masters.values()
        yield from self._tables()
        for state in self._states.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield value
        for _, _, tensor in self._lazy.export():
            yield tensor

    def export_state(self) -> tuple[dict[str, torch.Tensor | HomeTensor], StateScalars]:
        """The state for a checkpoint, by ``<parameter>//<what>``; the same wherever the state is. The tensors are the live ones,
        not copies; ``join`` before.
        """
        tensors: dict[str, torch.Tensor | HomeTensor] = {
            f"{name}//{MASTER}": master.detach() for name, master in self._masters.items()
        }
        scalars: StateScalars = {}
        for name, stepped in self._stepped.items():
            for key, value in self._states.get(stepped, {}).items():
                if key in _CONSTANT_MAPS:
                    continue
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}//{key}"] = value
                else:
                    scalars[f"{name}//{key}"] = value
        tensors.update({f"{name}//{key}": tensor for name, key, tensor in self._lazy.export()})
        for rounding in filter(None, (self._rounding, self._on_host_rounding)):
            scalars.update({f"{name}//{NUM_ROUNDINGS}": count for name, count in rounding.num_roundings.items()})
        for name in self.on_host.names if self.on_host is not None else ():
            for key, held in self.on_host.export(name).items():  # type: ignore[union-attr]
                tensors[f"{name}//{key}"] = held
        return tensors, scalars

    def set_weight(self, name: str, value: torch.Tensor) -> None:
        """Set the host's copy of a weight whose state left, where that copy is no master below fp32 that a checkpoint holds."""
        if self._is_on_host(name) and (self._named[name].dtype == torch.float32 or self._rounding is not None):
            self.on_host.set(name, MASTER, value)  # type: ignore[union-attr]

    @torch.no_grad()
    def import_state(self, tensors: Mapping[str, torch.Tensor], scalars: StateScalars) -> None:
        """Undo ``export_state``. Raises CheckpointInvalid where names do not match this model and its optimizer."""
        items: list[tuple[str, Any]] = [*tensors.items(), *scalars.items()]
        for full_name, value in items:
            name, _, key = full_name.rpartition("//")
            if name not in self._named:
                raise CheckpointInvalid(f"optimizer state names {name!r}, which the model does not have")
            if key not in self._known_keys:
                raise CheckpointInvalid(f"optimizer state holds {key!r} of {name}, which this optimizer does not keep")
            rounding = self._on_host_rounding if self._is_on_host(name) else self._rounding
            if key == NUM_ROUNDINGS and rounding is not None:
                rounding.num_roundings[name] = int(value)
            elif self._is_on_host(name):
                self.on_host.set(name, key, value)  # type: ignore[union-attr]
            elif name in self._lazy.names:
                self._lazy.set(name, key, value)
            elif key == MASTER:
                self._masters[name].copy_(value)
            else:
                stepped = self._stepped[name]
                # A copy: what was read from a file may be a view of the whole file.
                on_device = value.to(stepped.device, copy=True) if isinstance(value, torch.Tensor) else value
                self._states[stepped][key] = on_device
        tables: Any = getattr(self._inner, "name2qmap", {})
        for owner, state in self._states.items():
            # bitsandbytes gives its tables only to tensors it keeps in 8 bits.
            if "absmax1" in state:
                for key, map_name in _CONSTANT_MAPS.items():
                    state[key] = tables[map_name].to(owner.device)

    # Helpers.

    def _stepped_for(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer steps: the master, the weight itself, or one that has numbers only during its update."""
        if self._rounding is None or parameter.dtype == torch.float32:
            return self._masters.get(name, parameter)
        return nn.Parameter(_empty_like(parameter))

    def _is_on_host(self, name: str) -> bool:
        return self.on_host is not None and name in self.on_host.names

    def _tables(self) -> Iterator[torch.Tensor]:
        """Move the maps of 8-bit values: bitsandbytes makes them with the optimizer, and has them on the device from the
        first update on."""
        if any(self._parameter_of[stepped].numel() >= MIN_8BIT_ELEMENTS for stepped in self._group_of):
            devices = {stepped.device for stepped in self._group_of}
            yield from (table for table in getattr(self._inner, "name2qmap", {}).values() if table.device in devices)

    def _makes_state(self) -> AbstractContextManager[None]:
        """Count as state what torch's optimizers allocate: in a tensor's first update, and nothing after."""
        return nullcontext() if self._meter is None else self._meter.region("optimizer_state")

    def _require(self, names: Sequence[str], *_: Any, asked: Callable[[], bool] | None = None) -> None:
        """asked: whether they are used now at all."""
        if asked is None or asked():
            for name in names:
                self.require(name)

    @property
    def _states(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {} if self._inner is None else self._inner.state

    def _step_from_host(self, gradients: HostGradients, grad_factor: torch.Tensor | None) -> None:
        arrived = gradients.arrived()
        if self.on_host is not None and self._worker is not None:
            leaving = [name for name in self.on_host.names if name in arrived and not gradients.is_used(name)]
            self.on_host.begin(leaving)
            facts = UpdateFacts(learning_rate=self.learning_rate, grad_factor=grad_factor)
            self._worker.submit(partial(self.on_host.run, leaving, gradients.on_the_host, facts))
        for name in self._stepped:
            if name in arrived:
                with gradients.on_device(name, grad_factor) as factor_left:
                    self.step_one(name, grad_factor=factor_left)

    def _step_one(self, stepped: torch.Tensor, grad_factor: torch.Tensor | None) -> None:
        parameter = self._parameter_of[stepped]
        if parameter.grad is None or self._inner is None:
            return
        groups = self._inner.param_groups
        # The optimizer sees one parameter at a time: one fp32 gradient exists at a time.
        self._inner.param_groups = [{**self._group_of[stepped], "params": [stepped], "lr": self.learning_rate}]
        try:
            if stepped is parameter:
                self._run_inner(self._inner)
                return
            gradient = parameter.grad.to(torch.float32)
            parameter.grad = None
            if self._rounding is not None:
                stepped.data = parameter.detach().to(torch.float32)
            stepped.grad = gradient
            del gradient
            if grad_factor is not None:
                stepped.grad.mul_(grad_factor)
            self._run_inner(self._inner)
            stepped.grad = None
            self._round(parameter, stepped)
            with torch.no_grad():
                parameter.copy_(stepped)
            if self._rounding is not None:
                stepped.data = _empty_like(parameter)
        finally:
            self._inner.param_groups = groups

    def _run_inner(self, inner: torch.optim.Optimizer) -> None:
        """One update; what is not state of optimizers that make theirs apart counts as what it is."""
        make_state = getattr(inner, "make_state", None)
        if make_state is None:
            with self._makes_state():
                inner.step()
            return
        with self._makes_state():
            make_state()
        inner.step()

    def _round(self, parameter: nn.Parameter, stepped: torch.Tensor) -> None:
        if self._rounding is not None:
            name = self._name_of[parameter]
            self._rounding.begin(name)
            self._rounding.round_(stepped.detach().view(-1), name=name)


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    """No fp32 numbers, with as many dimensions: weight decay goes by them."""
    return torch.empty((0,) * max(1, parameter.dim()), dtype=torch.float32, device=parameter.device)
