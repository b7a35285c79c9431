"""The trained weights of a run as they are to be saved: one at a time, wherever they live, in whichever form.

Trained tensors come from their fp32 masters where there are any, streamed ones from their home, packed ones unpacked; with
adapters merged, each base matrix has its adapter added in fp32 and is rounded once. Nothing is brought to the device, and
no more than one tensor of the model, with what it is made of, is in memory at a time.
"""

from functools import partial
from typing import Any

import torch

from optimizer.models.adapters import ADAPTER_NAME, Site, add_adapter, list_sites
from optimizer.models.files.tensor_files import TensorEntry
from optimizer.runtime.layers.quantized_linear import BaseTensor, list_base_tensors
from optimizer.runtime.step.step import Trainer

_MASTER_SUFFIX = "//master"


class FinalWeights:
    """The weights of a trainer between steps; ``read`` while it is open."""

    def __init__(self, trainer: Trainer) -> None:
        trainer.join()
        self._model = trainer.model
        self._parameters = dict(trainer.model.named_parameters())
        self._read_weight = trainer.read_weight
        state, _ = trainer.optimizer.export_state()
        self._masters: dict[str, Any] = {
            name.removesuffix(_MASTER_SUFFIX): held for name, held in state.items() if name.endswith(_MASTER_SUFFIX)
        }

    def read(self, name: str) -> torch.Tensor:
        """A parameter's newest numbers in host memory, not to be written to; fp32 where there is a master."""
        master = self._masters.get(name)
        if master is None:
            return self._read_weight(name).cpu()
        tensor: torch.Tensor = master.detach() if isinstance(master, torch.Tensor) else master.load()
        return tensor.cpu()

    def model_tensors(self, *, dtype: torch.dtype) -> list[TensorEntry]:
        """The whole model under its own names; adapters, where there are any, added in."""
        sites = {site.name: site for site in list_sites(self._model)}
        return [
            TensorEntry(
                name=base.name, shape=base.shape, dtype=dtype, read=partial(self._merged, base, sites.get(base.name))
            )
            for base in list_base_tensors(self._model)
        ]

    def adapter_tensors(self, *, dtype: torch.dtype) -> list[TensorEntry]:
        """The adapters alone, under the names they have in the model."""
        return [
            TensorEntry(name=name, shape=tuple(parameter.shape), dtype=dtype, read=partial(self.read, name))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def _merged(self, base: BaseTensor, site: Site | None) -> torch.Tensor:
        weight = base.make([self.read(name) for name in base.sources])
        if site is None:
            return weight
        pair = (site.layer.lora_A[ADAPTER_NAME].weight, site.layer.lora_B[ADAPTER_NAME].weight)
        return add_adapter(weight, site, [self.read(self._name_of(factor)) for factor in pair])

    def _name_of(self, parameter: torch.Tensor) -> str:
        return next(name for name, other in self._parameters.items() if other is parameter)
