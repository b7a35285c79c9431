"""Fills a model that was built without data from files, one tensor at a time, each straight to its place.

A tensor is read into host memory, brought to the device, converted or packed there, and becomes its parameter; on the CPU device
what needs neither is read where it stays. Beyond what stays, no more than one tensor as the file has it and one as the plan wants
it are in memory, and while packing a piece. What streams is not read here: its parameter keeps the read for whoever makes its
home (``step/weights.py``), so that the blocks' weights never stand on the host together.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import nn

from optimizer.models.files.load import WeightRead
from optimizer.runtime.layers.quantize import PackedForm, pack_in_pieces
from optimizer.runtime.layers.quantized_linear import BaseTensor, list_base_tensors
from optimizer.runtime.meter.meter import Meter

_LATER: Final = "read_later"

ReadParameter = Callable[[], torch.Tensor]
"""Reads a parameter's numbers as the plan wants them, on the device they were asked for."""


def fill_model(
    model: nn.Module,
    reads: Mapping[str, WeightRead],
    *,
    device: torch.device,
    streamed: Collection[str] = (),
    meter: Meter | None = None,
) -> None:
    """Give every parameter on ``meta`` its numbers from ``reads``; everything else goes to the device as it is.

    model: prepared, so with its adapters, which have numbers, and its matrices packed. streamed: names of parameters that are
    read later. Raises the errors of the reads.
    """
    later = read_parameters(model, reads, device=device, meter=meter)
    for name, parameter in list(model.named_parameters()):
        if name in streamed and parameter.is_meta:
            empty = _empty(parameter, device)
            setattr(empty, _LATER, later[name])
            _replace(model, parameter, empty)
        elif parameter.is_meta:
            value = nn.Parameter(later.pop(name)(), requires_grad=parameter.requires_grad)
            if meter is not None:
                meter.assign(value, "weights")
            _replace(model, parameter, value)
        elif parameter.device != device:
            parameter.data = parameter.data.to(device)
    for name, buffer in list(model.named_buffers()):
        if name in reads:
            buffer.copy_(reads[name].read())
        if buffer.device != device:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, buffer.to(device))


def read_parameters(
    model: nn.Module, reads: Mapping[str, WeightRead], *, device: torch.device, meter: Meter | None = None
) -> dict[str, ReadParameter]:
    """How each parameter of a prepared model is read, by its name; adapters are not among them."""
    later: dict[str, ReadParameter] = {}
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for base in list_base_tensors(model):
        weight = reads[base.name]
        if base.form is None:
            name = base.sources[0]
            later[name] = partial(_read_as, weight, dtypes[name], device=device, meter=meter)
        else:
            pair = _PackedPair(weight, base, device=device, meter=meter)
            later |= {name: partial(pair.take, index) for index, name in enumerate(base.sources)}
    return later


def take_read_later(parameter: nn.Parameter) -> ReadParameter | None:
    """The read of a parameter that was left for later, handed out once; None for one that has its numbers."""
    read: ReadParameter | None = getattr(parameter, _LATER, None)
    if read is not None:
        delattr(parameter, _LATER)
    return read


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, parameters on ``meta`` are of one element, repeated, on the CPU: for peft, which looks where a weight is and
    draws its adapters there. Whether they are trained is taken over after.
    """
    stands: list[tuple[nn.Parameter, nn.Parameter]] = []
    for parameter in list(model.parameters()):
        if parameter.is_meta:
            data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            stand_in = nn.Parameter(data, requires_grad=parameter.requires_grad)
            _replace(model, parameter, stand_in)
            stands.append((parameter, stand_in))
    try:
        yield
    finally:
        for parameter, stand_in in stands:
            parameter.requires_grad_(stand_in.requires_grad)
            _replace(model, stand_in, parameter)


# Reading.


def _read_as(weight: WeightRead, dtype: torch.dtype, *, device: torch.device, meter: Meter | None) -> torch.Tensor:
    stays = device.type == "cpu" and weight.dtype == dtype
    tensor = _read(weight, meter, stays=stays)
    return tensor.to(device).to(dtype).contiguous()


def _read(weight: WeightRead, meter: Meter | None, *, stays: bool = False) -> torch.Tensor:
    """stays: what is read is what the device keeps, and not a stage on the way."""
    tensor = weight.read()
    if meter is not None and not stays:
        meter.assign(tensor, "temporaries", tier="host")
    return tensor


class _PackedPair:
    """Packed bytes and scales of one matrix: made when the first is taken, the second kept until it is."""

    def __init__(self, weight: WeightRead, base: BaseTensor, *, device: torch.device, meter: Meter | None) -> None:
        assert base.form is not None
        self._weight = weight
        self._form: PackedForm = base.form
        self._input_dim = base.input_dim
        self._device = device
        self._meter = meter
        self._made: dict[int, torch.Tensor] = {}

    def take(self, index: int) -> torch.Tensor:
        if index not in self._made:
            matrix = _read(self._weight, self._meter).to(self._device).to(self._form.dtype)
            self._made = dict(enumerate(pack_in_pieces(matrix, self._form.form, input_dim=self._input_dim)))
        return self._made.pop(index)


# Parameters.


def _empty(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of this shape whose storage has no bytes."""
    data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    data.untyped_storage().resize_(0)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Everywhere, so that what is tied stays tied."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new
