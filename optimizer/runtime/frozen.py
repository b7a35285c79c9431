"""Carries out ``weights.frozen``: matrices that are not trained are held in 8 or 4 bits and brought back for each product.

int8  one signed byte per element and one scale for each output, ``largest / 127`` rounded to the weights' dtype first, so that
      packing and unpacking use the same number.
nf4   two elements a byte and one fp32 scale for each 64 elements in the order of memory (Dettmers et al. 2023, QLoRA), without
      double quantization; packed and unpacked by bitsandbytes.

Packed bytes and scales are parameters without gradient, so whatever counts, moves or streams a block's weights sees them. The
product saves nothing but references to the two, through ``save_for_backward``, and unpacks again in backward; bitsandbytes'
own ``MatMul4Bit`` hides them from saved-tensor hooks, and gives wrong gradients when weights move meanwhile. A product's result
and its gradient are, bit for bit, those of the same product with the unpacked weight.

Stacked experts (Mixtral) have no product of their own to replace: their whole layer is run again in backward, from its inputs.
That is done for adapted experts too, packed or not, since autograd would otherwise save a second copy of all experts.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.errors import MissingExtra
from optimizer.models.adapters import ADAPTER_NAME, base_name, expert_factors, has_adapters
from optimizer.models.build import find_blocks
from optimizer.plan.weights import FrozenFormat

NF4_BLOCK_ELEMENTS = 64
_INT8_MAX = 127


def freeze_base(model: nn.Module, form: FrozenFormat, *, device: torch.device | None = None) -> None:
    """Pack every matrix inside the blocks that is not trained. ``same`` packs none.

    device: where to pack, one matrix at a time; the results return to where the matrix was. Raises MissingExtra.
    """
    for block in find_blocks(model):
        for parent in list(block.modules()):
            if hasattr(parent, "parameter_name"):
                continue  # One of peft's wrappers around experts; the outermost was seen as a child.
            for name, child in list(parent.named_children()):
                if form != "same" and _is_linear(child) and not child.weight.requires_grad:
                    setattr(parent, name, PackedLinear(child, form, device=device))
                elif _has_stacked_experts(child):
                    _take_over_experts(child, form, device=device)


def hash_frozen(model: nn.Module) -> str:
    """sha256 of every parameter that is not trained, packed ones as they are packed; empty where all are trained."""
    if not has_adapters(model):
        return ""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)};".encode())
            # A copy: a storage that numpy was shown can never be resized again, and weights that stream must be.
            flat = parameter.detach().to(device="cpu", copy=True).contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class BaseTensor:
    """One tensor of the model as it is without adapters, and the parameters it is held in."""

    name: str
    """In the model without adapters."""
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of parameters: itself, or packed bytes and scales."""
    form: "PackedForm | None"

    def make(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """From the sources' values, in their order."""
        return sources[0] if self.form is None else unpack(sources[0], sources[1], self.form)


def list_base_tensors(model: nn.Module) -> Iterator[BaseTensor]:
    """All but adapters, in the model's order, tied ones once."""
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        packed: dict[str, PackedForm] = getattr(module, "packed_forms", {})
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{key}"
            stem = key.removesuffix("_packed")
            if id(parameter) in seen or _is_of_adapter(name) or key.removesuffix("_scales") in packed:
                continue
            seen.add(id(parameter))
            form = packed.get(stem) if stem != key else None
            sources = (name,) if form is None else (name, f"{module_name}.{stem}_scales")
            shape = tuple(parameter.shape) if form is None else form.shape
            yield BaseTensor(name=base_name(f"{module_name}.{stem}"), shape=shape, sources=sources, form=form)


def _is_of_adapter(name: str) -> bool:
    return any(part in ("lora_A", "lora_B") for part in name.split("."))


# Packing.


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """How one tensor is packed, and what it was."""

    form: FrozenFormat
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def pack(
    weight: torch.Tensor, form: FrozenFormat, *, input_dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor, PackedForm]:
    """Packed bytes and scales. input_dim: the dimension over which products sum; int8 has one scale for all of it."""
    weight = weight.detach()
    packed_form = PackedForm(form=form, shape=tuple(weight.shape), dtype=weight.dtype)
    if form == "int8":
        return *_pack_int8(weight, input_dim), packed_form
    return *_pack_nf4(weight), packed_form


def unpack(packed: torch.Tensor, scales: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """The matrix in the dtype it had, a new tensor; no other memory is taken, and the same bits come each time."""
    if form.form == "int8":
        return packed.to(form.dtype).mul_(scales)
    blocks = (scales.numel(), NF4_BLOCK_ELEMENTS)
    flat = _bitsandbytes_ops().dequantize_4bit(packed, scales, NF4_BLOCK_ELEMENTS, "nf4", blocks, form.dtype)
    weight: torch.Tensor = flat.view(-1)[: form.num_elements].view(form.shape)
    return weight


def _pack_int8(weight: torch.Tensor, input_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    largest = weight.abs().amax(dim=input_dim, keepdim=True)
    scales = (largest.to(torch.float32) / _INT8_MAX).to(weight.dtype)
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).to(torch.float32)
    packed = weight.to(torch.float32).div(divisor).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return packed.to(torch.int8), scales


def _pack_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Padded to whole blocks of one row each: kernels differ in how they treat a matrix with odd sides.
    flat = F.pad(weight.reshape(-1), (0, -weight.numel() % NF4_BLOCK_ELEMENTS))
    packed, scales = _bitsandbytes_ops().quantize_4bit(flat, NF4_BLOCK_ELEMENTS, "nf4", torch.uint8)
    return packed.view(-1), scales


def _bitsandbytes_ops() -> Any:
    try:
        import bitsandbytes  # noqa: F401 (defines the ops below)
    except ImportError as error:
        raise MissingExtra("bitsandbytes", needed_for="frozen weights in nf4") from error
    return torch.ops.bitsandbytes


# Linear layers.


class PackedLinear(nn.Module):
    """Stands in for a frozen ``nn.Linear``, or for GPT-2's ``Conv1D``, whose weight is ``[in, out]``."""

    def __init__(self, linear: nn.Module, form: FrozenFormat, *, device: torch.device | None = None) -> None:
        super().__init__()
        weight: torch.Tensor = linear.weight  # type: ignore[assignment]
        self.is_transposed = not isinstance(linear, nn.Linear)
        self.weight_packed, self.weight_scales, self.form = _packed_parameters(
            weight, form, input_dim=0 if self.is_transposed else -1, device=device
        )
        self.packed_forms = {"weight": self.form}
        self.bias: torch.Tensor | None = linear.bias  # type: ignore[assignment]
        self.out_features, self.in_features = reversed(weight.shape) if self.is_transposed else weight.shape

    @property
    def weight(self) -> torch.Tensor:
        """Unpacked, anew each time."""
        return unpack(self.weight_packed, self.weight_scales, self.form)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = _product_dtype(hidden)
        result: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight_packed, self.weight_scales, self.bias, self.form, self.is_transposed, dtype
        )
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, form={self.form.form}"


class _Product(torch.autograd.Function):
    """``hidden @ weight + bias``, whose gradient is that of ``hidden`` alone."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        form: PackedForm,
        is_transposed: bool,  # noqa: FBT001 (autograd passes arguments by position)
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.form, ctx.is_transposed, ctx.hidden_dtype = form, is_transposed, hidden.dtype
        weight = unpack(packed, scales, form).to(dtype)
        hidden = hidden.to(dtype)
        if bias is not None:
            bias = bias.to(dtype)
        if not is_transposed:
            return F.linear(hidden, weight, bias)
        assert bias is not None  # Conv1D always has one
        rows = torch.addmm(bias, hidden.reshape(-1, hidden.shape[-1]), weight)
        return rows.view(*hidden.shape[:-1], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        packed, scales = ctx.saved_tensors
        weight = unpack(packed, scales, ctx.form).to(gradient.dtype)
        rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight.t() if ctx.is_transposed else weight)
        return rows.view(*gradient.shape[:-1], rows.shape[-1]).to(ctx.hidden_dtype), *(None,) * 6


def _packed_parameters(
    weight: torch.Tensor, form: FrozenFormat, *, input_dim: int, device: torch.device | None
) -> tuple[nn.Parameter, nn.Parameter, PackedForm]:
    moves = device is not None and not weight.is_meta
    packed, scales, packed_form = pack(weight.to(device) if moves else weight, form, input_dim=input_dim)
    packed, scales = (nn.Parameter(made.to(weight.device), requires_grad=False) for made in (packed, scales))
    return packed, scales, packed_form


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """What ``F.linear`` would compute in here."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


# Stacked experts.


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """One parameter that holds all experts of a layer: how it is held, and its adapter."""

    name: str
    form: PackedForm | None
    scaling: float | None

    @property
    def num_tensors(self) -> int:
        return (1 if self.form is None else 2) + (0 if self.scaling is None else 2)


class _Experts:
    """Runs a layer of experts from tensors it is given, so that autograd saves its inputs and nothing else."""

    def __init__(self, layer: nn.Module, adapters: dict[str, nn.Module]) -> None:
        self.layer = layer
        self.adapters = adapters
        self.stacks: list[_Stack] = []

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _RunAgain.apply(self.run, len(inputs), *inputs, *self._tensors())  # type: ignore[no-untyped-call]
        return result

    def run(self, inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with self._weights_set(dict(self._make_weights(tensors))):
            result: torch.Tensor = type(self.layer).forward(self.layer, *inputs)
        return result

    def _tensors(self) -> Iterator[torch.Tensor]:
        for stack in self.stacks:
            names = (stack.name,) if stack.form is None else (f"{stack.name}_packed", f"{stack.name}_scales")
            yield from (self.layer.get_parameter(name) for name in names)
            if stack.scaling is not None:
                adapter: Any = self.adapters[stack.name]
                yield adapter.lora_A[ADAPTER_NAME].weight
                yield adapter.lora_B[ADAPTER_NAME].weight

    def _make_weights(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        start = 0
        for stack in self.stacks:
            given = tensors[start : start + stack.num_tensors]
            start += stack.num_tensors
            weight = given[0] if stack.form is None else unpack(given[0], given[1], stack.form)
            if stack.scaling is not None:
                low, high = expert_factors(given[-2], given[-1], num_experts=weight.shape[0])
                # As peft does: a weight does not change its dtype for autocast.
                with torch.autocast(weight.device.type, enabled=False):
                    weight = torch.baddbmm(weight, high, low, alpha=stack.scaling)
            yield stack.name, weight

    @contextmanager
    def _weights_set(self, weights: dict[str, torch.Tensor]) -> Iterator[None]:
        held: Any = self.layer._parameters
        before = dict(held)
        held.update(weights)
        try:
            yield
        finally:
            held.clear()
            held.update(before)


class _RunAgain(torch.autograd.Function):
    """Saves the inputs of a function and runs it again in backward, with the autocast it had."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], num_inputs: int, *tensors: torch.Tensor) -> torch.Tensor:
        kind = tensors[0].device.type
        ctx.run, ctx.num_inputs = run, num_inputs
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        ctx.save_for_backward(*tensors)
        return run(tensors[:num_inputs], tensors[num_inputs:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        tensors = [
            tensor.detach().requires_grad_(needs) if needs else tensor
            for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            result = ctx.run(tensors[: ctx.num_inputs], tensors[ctx.num_inputs :])
        wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
        gradients = iter(torch.autograd.grad(result, wanted, gradient))
        return None, None, *(next(gradients) if needs else None for needs in needed)


def _has_stacked_experts(module: nn.Module) -> bool:
    """The module itself, or peft's wrappers around it."""
    return any(parameter.dim() == 3 for parameter in _unwrapped(module).parameters(recurse=False))


def _unwrapped(module: nn.Module) -> nn.Module:
    while hasattr(module, "parameter_name"):
        module = module.base_layer  # type: ignore[assignment]
    return module


def _take_over_experts(outer: nn.Module, form: FrozenFormat, *, device: torch.device | None) -> None:
    adapters: dict[str, nn.Module] = {}
    layer = outer
    while hasattr(layer, "parameter_name"):
        adapters[str(layer.parameter_name)] = layer
        layer = layer.base_layer  # type: ignore[assignment]
    if form == "same" and not adapters:
        return
    experts = _Experts(layer, adapters)
    forms: dict[str, PackedForm] = {}
    for name, parameter in list(layer.named_parameters(recurse=False)):
        packed_form = None
        if form != "same" and parameter.dim() == 3:
            packed, scales, packed_form = _packed_parameters(parameter, form, input_dim=-1, device=device)
            forms[name] = packed_form
            del layer._parameters[name]
            layer.register_parameter(f"{name}_packed", packed)
            layer.register_parameter(f"{name}_scales", scales)
        adapter: Any = adapters.get(name)
        scaling = None if adapter is None else float(adapter.scaling[ADAPTER_NAME])
        experts.stacks.append(_Stack(name=name, form=packed_form, scaling=scaling))
    layer.packed_forms = forms  # type: ignore[assignment]
    # On the instance, like the wrapping of blocks: the class's own forward is what ``_Experts`` runs.
    outer.forward = experts.__call__
