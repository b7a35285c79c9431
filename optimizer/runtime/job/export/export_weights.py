"""The trained weights of a run as they are to be saved: one at a time, wherever they live, in whichever form.

Trained tensors come from their fp32 masters where there are any, streamed ones from their home, packed ones unpacked; with
adapters merged, each base matrix has its adapter added in fp32 and is rounded once. Nothing is brought to the device, and
no more than one tensor of the model, with what it is made of, is in memory at a time. A checkpoint gives the same as the
trainer that wrote it: what it does not hold is read from where the run had it from, and packed as it was there.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import nn

from optimizer.models.adapters import ADAPTER_NAME, Site, add_adapter, attach_adapters, list_sites
from optimizer.models.build import build_model, build_unfilled
from optimizer.models.files.load import WeightRead, find_reads
from optimizer.models.files.tensor_files import TensorEntry
from optimizer.models.spec import ModelSpec
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.checkpoint import Checkpoint
from optimizer.runtime.layers.filling import ReadParameter, read_parameters
from optimizer.runtime.layers.quantized_linear import BaseTensor, freeze_base, list_base_tensors
from optimizer.runtime.ranks.gathering import AnyTensor, load_tensor
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import TrainingWorkload

_MASTER_SUFFIX = "//master"
_CPU = torch.device("cpu")


class FinalWeights:
    """The weights of a model at one step, to be read one by one."""

    def __init__(self, model: nn.Module, read: Callable[[str], torch.Tensor]) -> None:
        """model: prepared; its parameters are looked at for names, shapes and which are trained. read: gives one of them, by
        name, in host memory, in fp32 where there is a master; not to be written to.
        """
        self.model = model
        self.read = read
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    @classmethod
    def of_trainer(
        cls,
        trainer: Trainer,
        *,
        state: Mapping[str, AnyTensor] | None = None,
        dealt: Mapping[str, AnyTensor] | None = None,
    ) -> Self:
        """Between steps; ``read`` while it is open. state: of all ranks, where there are several; dealt: the weights that one of
        them alone keeps.
        """
        trainer.join()
        if state is None:
            state, _ = trainer.optimizer.export_state()
        masters = {name.removesuffix(_MASTER_SUFFIX): held for name, held in state.items() if name.endswith(_MASTER_SUFFIX)}
        known: dict[str, AnyTensor] = {**(dealt or {}), **masters}

        def read(name: str) -> torch.Tensor:
            return (load_tensor(known[name]) if name in known else trainer.read_weight(name)).cpu()

        return cls(trainer.model, read)

    @classmethod
    def of_parts(
        cls, trainer: Trainer, spec: ModelSpec, *, weights: Mapping[str, AnyTensor], state: Mapping[str, AnyTensor]
    ) -> Self:
        """The same of ranks that share each block. spec: of the whole model. weights, state: whole tensors of all ranks."""
        workload, plan = trainer.workload, trainer.plan.weights
        model = build_unfilled(spec, dtype=torch_dtype(plan))
        if workload.adapter is not None:
            attach_adapters(model, workload.adapter, seed=workload.seed)
            freeze_base(model, plan.frozen)
        masters = {name.removesuffix(_MASTER_SUFFIX): held for name, held in state.items() if name.endswith(_MASTER_SUFFIX)}
        known = {**weights, **masters}
        return cls(model, lambda name: load_tensor(known[name]).cpu())

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        *,
        weights: WeightsPlan,
        workload: TrainingWorkload,
        weights_folder: Path | None,
    ) -> Self:
        """The weights that a run had at a checkpoint, which needs no device.

        weights, workload: of the run. weights_folder: where it read what it does not train; None draws that again from the
        seed, whole in memory.
        """
        trained, state = checkpoint.load("model"), checkpoint.load("optimizer")
        model = build_unfilled(spec, dtype=torch_dtype(weights))
        frozen: Mapping[str, ReadParameter] = {}
        if workload.adapter is not None:
            reads = _draw_again(spec, weights, workload) if weights_folder is None else find_reads(model, weights_folder)
            attach_adapters(model, workload.adapter, seed=workload.seed)
            freeze_base(model, weights.frozen)
            frozen = read_parameters(model, reads, device=_CPU)

        def read(name: str) -> torch.Tensor:
            master = f"{name}{_MASTER_SUFFIX}"
            if master in state:
                return state[master]
            return trained[name] if name in trained else frozen[name]()

        return cls(model, read)

    def model_tensors(self, *, dtype: torch.dtype) -> list[TensorEntry]:
        """The whole model under its own names; adapters, where there are any, added in."""
        sites = {site.name: site for site in list_sites(self.model)}
        return [
            TensorEntry(
                name=base.name, shape=base.shape, dtype=dtype, read=partial(self._merged, base, sites.get(base.name))
            )
            for base in list_base_tensors(self.model)
        ]

    def adapter_tensors(self, *, dtype: torch.dtype) -> list[TensorEntry]:
        """The adapters alone, under the names they have in the model."""
        return [
            TensorEntry(name=name, shape=tuple(parameter.shape), dtype=dtype, read=partial(self.read, name))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def name_factors(self, site: Site) -> list[str]:
        """Names of the two parameters of a site's adapter."""
        pair = (site.layer.lora_A[ADAPTER_NAME].weight, site.layer.lora_B[ADAPTER_NAME].weight)
        return [self._names[id(factor)] for factor in pair]

    def _merged(self, base: BaseTensor, site: Site | None) -> torch.Tensor:
        weight = base.make([self.read(name) for name in base.sources])
        return weight if site is None else add_adapter(weight, site, [self.read(name) for name in self.name_factors(site)])


def _draw_again(spec: ModelSpec, weights: WeightsPlan, workload: TrainingWorkload) -> dict[str, WeightRead]:
    model = build_model(spec, dtype=torch_dtype(weights), seed=workload.seed)
    return {
        name: WeightRead(shape=tuple(parameter.shape), dtype=parameter.dtype, read=parameter.detach)
        for name, parameter in model.named_parameters()
    }
