"""Makes the model that a run trains: built, filled, with its adapters, its frozen weights packed, where the plan wants it."""

from pathlib import Path

import torch
from torch import nn

from optimizer.models.adapters import attach_adapters
from optimizer.models.build import build_model, build_unfilled
from optimizer.models.files.load import find_reads
from optimizer.models.spec import ModelSpec
from optimizer.plan.layout import ONE_DEVICE, DeviceLayout
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.layers.filling import fill_model, stand_ins
from optimizer.runtime.layers.quantized_linear import freeze_base
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.weights import name_streamed, torch_dtype
from optimizer.workload import TrainingWorkload


def build_prepared(
    spec: ModelSpec,
    *,
    weights: WeightsPlan,
    workload: TrainingWorkload,
    device: torch.device,
    weights_folder: Path | None = None,
    meter: Meter | None = None,
    layout: DeviceLayout = ONE_DEVICE,
) -> nn.Module:
    """The model as ``Trainer`` takes it: on the device, but for what its blocks will stream.

    layout: the plan's. Where it deals weights out to ranks, no more than a part of them is to stay here, and all are built on the
    host.
    weights_folder: where the model's own weights are read from, one tensor at a time, each straight to its place. None leaves
    the random ones that ``workload.seed`` draws; then what is packed or streamed is built on the host, so that the whole never
    stands on the device.
    """
    streams = weights.place != "device" or layout.shares_weights or layout.is_cut
    if weights_folder is not None:
        return _load_prepared(
            spec,
            weights=weights,
            workload=workload,
            device=device,
            weights_folder=weights_folder,
            meter=meter,
            streams=streams,
            is_cut=layout.is_cut,
        )
    packs = workload.adapter is not None and weights.frozen != "same"
    model = build_model(
        spec, dtype=torch_dtype(weights), device="cpu" if streams or packs else device, seed=workload.seed
    )
    prepare_model(model, weights=weights, workload=workload, device=device)
    return model if streams else model.to(device)


def _load_prepared(
    spec: ModelSpec,
    *,
    weights: WeightsPlan,
    workload: TrainingWorkload,
    device: torch.device,
    weights_folder: Path,
    meter: Meter | None,
    streams: bool,
    is_cut: bool,
) -> nn.Module:
    model = build_unfilled(spec, dtype=torch_dtype(weights))
    reads = find_reads(model, weights_folder)
    if workload.adapter is not None:
        with stand_ins(model):
            attach_adapters(model, workload.adapter, seed=workload.seed)
        freeze_base(model, weights.frozen)
    streamed = name_streamed(model, trains_all=workload.adapter is None) if streams else set()
    if is_cut:
        streamed = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    fill_model(model, reads, device=device, streamed=streamed, meter=meter)
    return model


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
