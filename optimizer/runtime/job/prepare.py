"""Makes the model that a run trains: built, filled, with its adapters, its frozen weights packed, where the plan wants it."""

from pathlib import Path

import torch
from torch import nn

from optimizer.models.adapters import attach_adapters
from optimizer.models.build import build_model, load_weights
from optimizer.models.spec import ModelSpec
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.layers.quantized_linear import freeze_base
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import TrainingWorkload


def build_prepared(
    spec: ModelSpec,
    *,
    weights: WeightsPlan,
    workload: TrainingWorkload,
    device: torch.device,
    weights_folder: Path | None = None,
) -> nn.Module:
    """The model as ``Trainer`` takes it: on the device, or on the host where its blocks are to stream.

    What is packed or streamed is built on the host, so that the whole never stands on the device. weights_folder: where the
    model's own weights are read from; None leaves the random ones that ``workload.seed`` draws.
    """
    streams = weights.place != "device"
    packs = workload.adapter is not None and weights.frozen != "same"
    model = build_model(
        spec, dtype=torch_dtype(weights), device="cpu" if streams or packs else device, seed=workload.seed
    )
    if weights_folder is not None:
        load_weights(model, weights_folder)
    prepare_model(model, weights=weights, workload=workload, device=device)
    return model if streams else model.to(device)


def prepare_model(
    model: nn.Module, *, weights: WeightsPlan, workload: TrainingWorkload, device: torch.device | None = None
) -> None:
    """Attach the workload's adapters and pack what stays frozen, in place; does nothing where every weight is trained.

    Call after weights were loaded, before anything wraps or streams the model. device: where to pack, one matrix at a time;
    results return to where the matrix was. Raises InvalidWorkload for targets, MissingExtra for peft and bitsandbytes.
    """
    if workload.adapter is None:
        return
    attach_adapters(model, workload.adapter, seed=workload.seed)
    freeze_base(model, weights.frozen, device=device)
