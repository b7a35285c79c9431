"""RMS norms that save for backward what they are given and one number a row, where autograd's own chain saves more.

transformers writes these norms as a chain of ops, of which autograd keeps every operand: in 16 bits a copy in fp32 and the
normalized rows besides, three times what went in. Here the chain is one node, whose backward makes those again on its way. It
runs the same ops on the same numbers in the same order, so results and gradients have the same bits.

Every architecture has a class of its own for these norms. Which chain a class is, is found by trying: of each class a small one
is made and compared, bit for bit, with the forms known here; one that is like none of them is left alone.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_WIDTH: Final = 8
_DTYPES: Final = (torch.float32, torch.bfloat16)


class _Form(NamedTuple):
    """The last ops on the normalized rows, which are in fp32."""

    offset: float
    """Added to the weight."""
    is_rounded_first: bool
    """To the dtype of what came in, before they are multiplied by the weight; else after."""


_FORMS: Final = (_Form(0.0, is_rounded_first=True), _Form(0.0, is_rounded_first=False), _Form(1.0, is_rounded_first=False))


def replace_norms(model: nn.Module) -> Callable[[], None]:
    """Have the model's RMS norms save less wherever autograd watches; returns a function that ends it."""
    taken = []
    for module in model.modules():
        form = None if "forward" in vars(module) else _form_of(module)
        if form is not None:
            module.forward = _lightened(module, form)
            taken.append(module)

    def undo() -> None:
        for module in taken:
            # The wrapper is an attribute of the instance; without it the class's own method shows again.
            del module.forward

    return undo


def _lightened(module: nn.Module, form: _Form) -> Callable[[torch.Tensor], Any]:
    forward = module.forward
    eps = _eps_of(module)

    @functools.wraps(forward)
    def run(hidden: torch.Tensor) -> Any:
        weight: Any = module.weight
        if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
            return forward(hidden)
        return _Norm.apply(hidden, hidden, weight, eps, form)  # type: ignore[no-untyped-call]

    return run


class _Norm(torch.autograd.Function):
    """Ops in the order in which autograd runs the chain's."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, _again: torch.Tensor, weight: torch.Tensor, eps: float, form: _Form
    ) -> torch.Tensor:
        """hidden: [..., width]; twice, since in fp32 the chain's two gradients of it are added to others' one after the other.
        weight: [width].
        """
        rows = hidden.float()
        scale = _scale_of(rows, eps)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.form = form
        return _multiplied(rows * scale, weight, form, hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, scale = ctx.saved_tensors
        is_rounded_first = ctx.form.is_rounded_first
        rows = hidden.float()
        of_weight = None
        if not is_rounded_first:
            gradient = gradient.float()
        if ctx.needs_input_grad[2]:
            normalized = rows * scale
            if is_rounded_first:
                normalized = normalized.to(hidden.dtype)
            of_weight = (gradient * normalized).sum(tuple(range(gradient.dim() - 1))).to(weight.dtype)
            del normalized
        if not ctx.needs_input_grad[0]:
            return None, None, of_weight, None, None
        of_rows = gradient * _factor(weight, ctx.form)
        if is_rounded_first:
            of_rows = of_rows.to(hidden.dtype).float()
        del gradient
        of_scale = (of_rows * rows).sum(-1, keepdim=True)
        # Of the sum of squares, over the width; a factor of two is exact wherever it stands.
        of_squares = -0.5 * of_scale * scale.pow(3) / rows.shape[-1]
        of_rows.mul_(scale)
        by_scale = rows * (2 * of_squares)
        if hidden.dtype == torch.float32:
            return of_rows, by_scale, of_weight, None, None
        return of_rows.add_(by_scale).to(hidden.dtype), None, of_weight, None, None


def _multiplied(normalized: torch.Tensor, weight: torch.Tensor, form: _Form, dtype: torch.dtype) -> torch.Tensor:
    factor = _factor(weight, form)
    return factor * normalized.to(dtype) if form.is_rounded_first else (normalized * factor).to(dtype)


def _factor(weight: torch.Tensor, form: _Form) -> torch.Tensor:
    return form.offset + weight.float() if form.offset else weight


def _form_of(module: nn.Module) -> _Form | None:
    """None for what is no norm of a known form."""
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm) or _eps_of(module) is None:
        return None
    weight = module._parameters.get("weight")
    kind: Any = type(module)
    return _form_of_class(kind) if weight is not None and weight.dim() == 1 else None


def _eps_of(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@functools.cache
def _form_of_class(kind: Callable[..., nn.Module]) -> _Form | None:
    # Under a trace tensors have no data; these must.
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
        try:
            module = kind(_WIDTH, eps=1e-3)
            return next((form for form in _FORMS if _is_of(module, form)), None)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # Made from something else than a width, or given something else than rows.
            return None


def _is_of(module: nn.Module, form: _Form) -> bool:
    """Report whether it returns what the form does, to the bit, whatever the dtypes of weights and rows."""
    rows = torch.linspace(-3, 5, 4 * _WIDTH).view(4, _WIDTH).sin()
    weight: Any = module.weight
    weight.copy_(torch.linspace(0.3, 1.7, _WIDTH))
    for dtype in _DTYPES:
        module.to(dtype)
        for given in (rows.to(other) for other in _DTYPES):
            wide = given.float()
            chain = _multiplied(wide * _scale_of(wide, _eps_of(module)), weight, form, given.dtype)
            found = module(given)
            if found.dtype != chain.dtype or not torch.equal(found, chain):
                return False
    return True


def _scale_of(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """One over the root mean square of each row, in fp32."""
    return torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
