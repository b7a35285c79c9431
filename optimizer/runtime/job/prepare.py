"""Makes the model that a run trains: built, filled, with its adapters, its frozen weights packed, where the plan wants it."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from optimizer.models.adapters import attach_adapters
from optimizer.models.build import build_model, build_unfilled
from optimizer.models.files.load import WeightRead, find_reads
from optimizer.models.spec import ModelSpec
from optimizer.plan.devices.layout import ONE_DEVICE, DeviceLayout
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.layers.filling import fill_model, stand_ins
from optimizer.runtime.layers.quantized_linear import freeze_base
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.ranks.tensor.slices import Slices
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
    rank: int = 0,
) -> nn.Module:
    """The model as ``Trainer`` takes it: on the device, but for what its blocks will stream.

    layout: the plan's. Where it deals weights out to ranks, no more than a part of them is to stay here, and all are built on the
    host; where ranks share each block, the model is this rank's.
    weights_folder: where the model's own weights are read from, one tensor at a time, each straight to its place. None leaves
    the random ones that ``workload.seed`` draws; then what is packed or streamed is built on the host, so that the whole never
    stands on the device.
    """
    if layout.shares_blocks:
        slicing = _Slicing(spec=spec, num_ranks=layout.tensor, rank=rank, meter=meter)
        return _build_part(slicing, weights=weights, workload=workload, device=device, weights_folder=weights_folder)
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


class _Slicing(NamedTuple):
    """The part of a model that is one rank's of several which share each block."""

    spec: ModelSpec
    """The whole model."""
    num_ranks: int
    rank: int
    meter: Meter | None


def _build_part(
    slicing: _Slicing, *, weights: WeightsPlan, workload: TrainingWorkload, device: torch.device, weights_folder: Path | None
) -> nn.Module:
    """A rank's own model, filled with its slices of the whole one: of files, tensor by tensor, or of what the seed draws, whole
    on the host. Adapters are drawn whole, too, so that all ranks together train those of one device.
    """
    dtype, meter = torch_dtype(weights), slicing.meter
    model = build_unfilled(slicing.spec.of_rank(slicing.num_ranks), dtype=dtype)
    whole = build_unfilled(slicing.spec, dtype=dtype)
    if weights_folder is not None:
        reads = find_reads(whole, weights_folder)
    else:
        drawn, meter = build_model(slicing.spec, dtype=dtype, seed=workload.seed), None
        reads = {
            name: WeightRead(shape=tuple(parameter.shape), dtype=parameter.dtype, read=parameter.detach)
            for name, parameter in drawn.named_parameters()
        }
    slices = Slices(model, rank=slicing.rank, num_ranks=slicing.num_ranks)
    reads = {name: slices.read(name, weight, meter=meter) for name, weight in reads.items()}
    if workload.adapter is not None:
        for each in (whole, model):
            with stand_ins(each):
                attach_adapters(each, workload.adapter, seed=workload.seed)
        slices = Slices(model, rank=slicing.rank, num_ranks=slicing.num_ranks)
        drawn_whole = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                parameter.data = slices.take(name, drawn_whole[name].detach())
        freeze_base(model, weights.frozen)
    streamed = name_streamed(model, trains_all=workload.adapter is None) if weights.place != "device" else set()
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
