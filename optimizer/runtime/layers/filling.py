"""Fills a model that was built without data from files, one tensor at a time, each straight to its place.

A tensor is read into host memory, brought to the device, converted or packed there, and becomes its parameter; on the CPU
device what needs neither is read where it stays. Beyond what stays, no more than one tensor as the file has it and one as
the plan wants it are in memory, and while packing a piece. What streams is not read here: its parameter keeps the read for
whoever makes its home (``step/weights.py``), so that the blocks' weights never stand on the host together.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Final

import torch
from torch import nn

from optimizer.models.files.load import WeightRead
from optimizer.runtime.layers.quantize import PackedForm, pack_in_pieces
from optimizer.runtime.layers.quantized_linear import BaseTensor, list_base_tensors
from optimizer.runtime.meter.meter import Meter, count_allocations, set_region

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
    _move_what_is_there(model, reads, device=device, meter=meter)
    later = read_parameters(model, reads, device=device, meter=meter, streamed=streamed)
    unread = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    for name in [name for name in unread if name in streamed]:
        empty = _empty(unread[name], device)
        setattr(empty, _LATER, later[name])
        _replace(model, unread.pop(name), empty)
    with count_allocations(meter):
        set_region(meter, "weights")
        for name, parameter in unread.items():
            filled = nn.Parameter(later.pop(name)(), requires_grad=parameter.requires_grad)
            if meter is not None:
                meter.assign(filled, "weights")
            _replace(model, parameter, filled)


def _move_what_is_there(
    model: nn.Module, reads: Mapping[str, WeightRead], *, device: torch.device, meter: Meter | None
) -> None:
    """Adapters and buffers."""
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.device != device:
            parameter.data = parameter.data.to(device)
    for name, buffer in list(model.named_buffers()):
        if name in reads:
            buffer.copy_(reads[name].read())
        if buffer.device != device:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, buffer.to(device))
    if meter is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                meter.assign(tensor, "weights")


def read_parameters(
    model: nn.Module,
    reads: Mapping[str, WeightRead],
    *,
    device: torch.device,
    meter: Meter | None = None,
    streamed: Collection[str] = (),
) -> dict[str, ReadParameter]:
    """Readers of each parameter of a prepared model, by its name; adapters are not among them.

    streamed: names of those that are converted on the host, where they stay.
    """
    later: dict[str, ReadParameter] = {}
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for base in list_base_tensors(model):
        weight = reads[base.name]
        if base.form is None:
            name = base.sources[0]
            place = torch.device("cpu") if name in streamed else device
            is_final = device.type == "cpu" and weight.dtype == dtypes[name] and name not in streamed
            later[name] = partial(_read_as, weight, dtypes[name], device=place, meter=None if is_final else meter)
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
    return _read(weight, meter).to(device).to(dtype).contiguous()


def _read(weight: WeightRead, meter: Meter | None) -> torch.Tensor:
    """meter: None where what is read is what stays; otherwise it is a stage on the way, on the host."""
    with nullcontext() if meter is None else meter.region("temporaries", tier="host"):
        return weight.read()


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
