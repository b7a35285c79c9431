"""Carries out ``weights.frozen``: matrices that are not trained are held in 8 or 4 bits (``quantize.py``) and brought back for
each product.

Packed bytes and scales are parameters without gradient, so whatever counts, moves or streams a block's weights sees them. The
product saves nothing but references to the two, through ``save_for_backward``, and unpacks again in backward; bitsandbytes'
own ``MatMul4Bit`` hides them from saved-tensor hooks, and gives wrong gradients when weights move meanwhile. A product's result
and its gradient are, bit for bit, those of the same product with the unpacked weight.

Stacked experts are another matter (``experts.py``).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.models.adapters import base_name, has_adapters
from optimizer.models.anatomy import find_blocks
from optimizer.plan.weights import FrozenFormat
from optimizer.runtime.layers.experts import has_stacked_experts, take_over_experts
from optimizer.runtime.layers.matmul_dispatch import making_products
from optimizer.runtime.layers.quantize import PackedForm, pack_parameter, unpack


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
                elif has_stacked_experts(child):
                    take_over_experts(child, form, device=device)


def hash_frozen(model: nn.Module, *, read: Callable[[str], torch.Tensor] | None = None) -> str:
    """sha256 of every parameter that is not trained, packed ones as they are packed; empty where all are trained.

    read: gives a parameter's numbers by its name where they stream, or where others have a part of them; the parameter itself
    otherwise.
    """
    if not has_adapters(model):
        return ""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            whole = parameter if read is None else read(name)
            digest.update(f"{name} {parameter.dtype} {tuple(whole.shape)};".encode())
            flat = whole.detach().reshape(-1)
            for piece in torch.split(flat, PIECE_ELEMENTS):
                # A copy: a storage that numpy was shown can never be resized again, and weights that stream must be.
                copied = piece.to(device="cpu", copy=True).contiguous()
                digest.update(copied.view(torch.uint8).numpy().data)
                del copied
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class BaseTensor:
    """One tensor of the model as it is without adapters, and the parameters it is held in."""

    name: str
    """In the model without adapters."""
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of parameters: itself, or packed bytes and scales."""
    form: PackedForm | None
    input_dim: int = -1
    """The dimension over which products sum."""

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
            input_dim = 0 if getattr(module, "is_transposed", False) else -1
            yield BaseTensor(
                name=base_name(f"{module_name}.{stem}"), shape=shape, sources=sources, form=form, input_dim=input_dim
            )


def _is_of_adapter(name: str) -> bool:
    return any(part in ("lora_A", "lora_B") for part in name.split("."))


# Linear layers.


class PackedLinear(nn.Module):
    """Stands in for a frozen ``nn.Linear``, or for GPT-2's ``Conv1D``, whose weight is ``[in, out]``."""

    def __init__(self, linear: nn.Module, form: FrozenFormat, *, device: torch.device | None = None) -> None:
        super().__init__()
        weight: torch.Tensor = linear.weight  # type: ignore[assignment]
        self.is_transposed = not isinstance(linear, nn.Linear)
        self.weight_packed, self.weight_scales, self.form = pack_parameter(
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
        with _making(hidden, weight):
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
        with _making(gradient, weight):
            rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight.t() if ctx.is_transposed else weight)
        return rows.view(*gradient.shape[:-1], rows.shape[-1]).to(ctx.hidden_dtype), *(None,) * 6


def _making(rows: torch.Tensor, weight: torch.Tensor) -> AbstractContextManager[None]:
    return making_products(rows.numel() // rows.shape[-1], *weight.shape, of=rows)


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype in which ``F.linear`` would compute here."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
