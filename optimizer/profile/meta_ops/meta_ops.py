"""Runs torch code without data and as if on the CPU: tensors are on the device ``meta``, which is fast and allocates nothing.

FakeTensorMode promises the same at some ten times the cost per op. Four things differ between ``meta`` and the CPU, and
each is seen to here:

- What an op returns: the dtype of a layer norm's statistics, the strides of an index. Where FakeTensorMode has its own
  answer it is asked; either way once for each op and layout of arguments (``Ops``).
- What Python code reads and says of devices: ``tensor.device`` reads ``cpu``, and tensors asked for on ``cpu`` have no
  data (``pretend_cpu``, ``Ops``).
- Which attention kernel runs: the CPU's own chooser is asked (``pretend_cpu``).
- What autocast casts (``autocast.py``).

*Not modelled*: C++ code above the ops that branches on the device, attention aside. Tests compare with real steps.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from optimizer.profile.meta_ops.autocast import autocast_on_meta
from optimizer.profile.meta_ops.kernels import run_fresh, run_torchs
from optimizer.profile.meta_ops.stub_imports import import_meta_kernels

_CPU = torch.device("cpu")
_META = torch.device("meta")
_true_device_of = torch._C.TensorBase.device.__get__
_get_item = torch._C.TensorBase.__getitem__
_SAME_ON_META = frozenset(
    f"aten.{name}.default"
    for name in (
        "_unsafe_view",
        "embedding",
        "empty_like",
        "full_like",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "new_ones",
        "new_zeros",
        "ones_like",
        "zeros_like",
    )
)
"""Ops of which FakeTensorMode has an answer of its own that is that of ``meta`` too, or of ``kernels.py``. Its first costs half a
second."""
_FLASH_ATTENTION = 1
"""``SDPBackend::flash_attention`` (aten/src/ATen/native/transformers/sdp_utils_cpp.h)."""


class OpTraits(NamedTuple):
    """Traits of an op that its schema names."""

    name: str
    """Name of the op, like ``aten.mm.default``."""
    makes: bool
    """True where it can return new storage: not all that it returns are aliases."""
    writes: bool
    """True where it writes to one of its arguments."""
    sets_view: bool
    """True where it only changes which bytes an argument shows, and how (``set_``)."""
    returns_first: bool
    """True where it returns its first argument with its layout as it was (``add_``)."""
    asks_fake_mode: bool
    """True where its return on ``meta`` need not be what it returns on the CPU."""


class _Layout(NamedTuple):
    """Layout of a tensor that an op returned; ``dtype`` None: no tensor, but ``value``."""

    dtype: torch.dtype | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    value: Any


class _Returned(NamedTuple):
    layouts: tuple[_Layout, ...]
    is_sequence: bool


class Ops:
    """Runs ops on ``meta`` tensors with the CPU's results. Every mode must be off meanwhile, as in ``__torch_dispatch__``."""

    def __init__(self) -> None:
        self._traits: dict[int, OpTraits] = {}
        self._seen: list[Any] = []  # keeps the ids above from being used again
        self._returned: dict[tuple[Any, ...], _Returned | None] = {}
        self.is_asking = False
        """Kernels without data are at work, which need to know what is on ``meta``."""
        self._written: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    @cached_property
    def _fake_mode(self) -> FakeTensorMode:
        import_meta_kernels()  # on which it is built
        mode = FakeTensorMode()
        mode.cache_enabled = False  # nothing is asked twice
        return mode

    def make_index(self, positions: list[Any]) -> torch.Tensor:
        """The tensor that Python code's list of positions becomes. No op makes it, so that only this knows what is in it."""
        with _disable_current_modes():
            real = torch.tensor(positions)
            stand_in = torch.empty_like(real, device=_META)
        self._written[id(stand_in)] = (weakref.ref(stand_in), real)
        return stand_in

    def read_index(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that ``make_index`` made; None of any other."""
        reference, real = self._written.get(id(tensor), (lambda: None, None))
        return real if reference() is tensor else None

    def traits(self, func: Any) -> OpTraits:
        # By id: hashing an op runs Python code of torch's.
        found = self._traits.get(id(func))
        if found is None:
            found = self._traits[id(func)] = _read_traits(func)
            self._seen.append(func)
        return found

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = self.traits(func)
        if traits.returns_first:
            return args[0]
        if not traits.makes or traits.writes:
            return _run_on_meta(func, args, kwargs)
        key = (id(func), _key_of(args), *((name, _key_of(value)) for name, value in kwargs.items()))
        if key not in self._returned:
            self._returned[key] = self._ask(func, args, kwargs, of_fake_mode=traits.asks_fake_mode)
        returned = self._returned[key]
        if returned is None:
            return _run_on_meta(func, args, kwargs)
        values = [_make(layout) for layout in returned.layouts]
        return tuple(values) if returned.is_sequence else values[0]

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, of_fake_mode: bool) -> _Returned | None:
        """The layouts of what an op returns; None where a result shares memory with an argument, whatever the schema
        says (``_unsafe_view``).
        """
        self.is_asking = True
        try:
            if not of_fake_mode:
                return _try(func, [_without_data(value) for value in args], _on_meta(kwargs))
            with self._fake_mode:
                return _try(
                    func, [_fake_value(value) for value in args], {k: _fake_value(v) for k, v in kwargs.items()}
                )
        finally:
            self.is_asking = False


@contextmanager
def pretend_cpu(ops: Ops) -> Iterator[None]:
    """While entered, Python code finds its ``meta`` tensors on the CPU. For this whole process, so run nothing beside it."""
    pretence = _Pretence(ops)
    _pretences.append(pretence)
    pretence.begin()
    try:
        yield
    finally:
        _pretences.pop().end()


@contextmanager
def stop_pretending() -> Iterator[None]:
    """Inside ``pretend_cpu``, what torch says is true again for a while; elsewhere nothing changes."""
    pretence = _pretences[-1] if _pretences else None
    if pretence is None or not pretence.is_on:
        yield
        return
    pretence.end()
    try:
        yield
    finally:
        pretence.begin()


class _Pretence:
    """The patches of one ``pretend_cpu``."""

    def __init__(self, ops: Ops) -> None:
        self.is_on = False
        self._ops = ops
        self._patches = ExitStack()

    def begin(self) -> None:
        self._patches.enter_context(_patched(self._ops))
        self.is_on = True

    def end(self) -> None:
        self._patches.close()
        self.is_on = False


_pretences: list[_Pretence] = []


@contextmanager
def _patched(ops: Ops) -> Iterator[None]:
    # Plain functions, since a mock would keep the tensors it was called with. Patched, since a TorchFunctionMode is off
    # while torch handles a call, and backward, in which blocks are recomputed, is such a call.
    def device_of(tensor: torch.Tensor) -> torch.device:
        return _true_device_of(tensor) if ops.is_asking else _CPU

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not ops.is_asking:
            args, kwargs = tuple(map(_to_meta, args)), {name: _to_meta(value) for name, value in kwargs.items()}
        return torch._C.TensorBase.to(tensor, *args, **kwargs)

    def item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        return _get_item(tensor, _indexed(index, ops) if _true_device_of(tensor) == _META else index)

    with (
        mock.patch.object(torch.Tensor, "device", property(device_of)),
        mock.patch.object(torch.Tensor, "__getitem__", item),
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(F, "scaled_dot_product_attention", _Attention()),
        autocast_on_meta(),
    ):
        yield


def _to_meta(value: Any) -> Any:
    return _META if isinstance(value, torch.device) else value


def _indexed(index: Any, ops: Ops) -> Any:
    """An index with the lists in it as tensors."""
    if isinstance(index, list):
        return ops.make_index(index) if index and all(type(each) is int for each in index) else index
    return tuple(_indexed(each, ops) for each in index) if isinstance(index, tuple) else index


class _Attention:
    """``scaled_dot_product_attention`` that takes the kernel which the CPU would take."""

    def __init__(self) -> None:
        self._original = F.scaled_dot_product_attention
        self._takes_flash: dict[tuple[Any, ...], bool] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        tensors = (query, key, value, attn_mask)
        # A mask that is learnt needs a gradient, which no fused kernel makes.
        is_learnt = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
        layouts = (_key_of(tensors), is_learnt, *sorted(settings.items()))
        if layouts not in self._takes_flash:
            self._takes_flash[layouts] = not is_learnt and _takes_flash_attention(tensors, settings)
        if not self._takes_flash[layouts]:
            return self._original(query, key, value, attn_mask, **settings)
        return _flash_attention(query, key, value, _additive(attn_mask, query.dtype), **settings)


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: torch.Tensor = kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return result


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors among an op's arguments, in order; lists are looked into."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def without_devices(value: Any) -> Any:
    """``value``, an argument of an op, with the CPU in place of any device."""
    return _CPU if isinstance(value, torch.device) else value


def _read_traits(func: Any) -> OpTraits:
    arguments, returns = func._schema.arguments, func._schema.returns
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    sets_view = torch.Tag.inplace_view in func.tags
    is_in_place = writes and func._schema.name.endswith("_") and len(returns) == 1
    return OpTraits(
        name=str(func),
        makes=any(value.alias_info is None for value in returns),
        writes=writes,
        sets_view=sets_view,
        returns_first=is_in_place and not sets_view,
        asks_fake_mode=func in op_implementations_dict and str(func) not in _SAME_ON_META,
    )


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_torchs(func._op, args, _on_meta(kwargs))


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": _META} if "device" in kwargs else kwargs


def _key_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride())
    if isinstance(value, list | tuple):
        return tuple(map(_key_of, value))
    if isinstance(value, torch.device):
        return None
    return (type(value), value)  # 1, 1.0 and True are equal and mean different things


def _make(layout: _Layout) -> Any:
    if layout.dtype is None:
        return layout.value
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=_META)


def _layout_of(value: Any) -> _Layout:
    if not isinstance(value, torch.Tensor):
        return _Layout(dtype=None, size=(), stride=(), value=value)
    return _Layout(dtype=value.dtype, size=tuple(value.shape), stride=value.stride(), value=None)


def _without_data(value: Any) -> Any:
    """An argument as it is on ``meta``: a tensor that model code writes out by its values has some."""
    if isinstance(value, torch.Tensor) and not value.is_meta and value.dim():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return [_without_data(item) for item in value] if isinstance(value, list) else value


def _fake_value(value: Any) -> Any:
    """Inside a FakeTensorMode."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CPU)
    if isinstance(value, list | tuple):
        return [_fake_value(item) for item in value]
    return without_devices(value)


def _try(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Returned | None:
    inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
    result = run_fresh(func, args, kwargs)
    is_sequence = isinstance(result, tuple | list)
    results = list(result) if is_sequence else [result]
    storages = [value.untyped_storage()._cdata for value in results if isinstance(value, torch.Tensor)]
    if inputs.intersection(storages) or len(set(storages)) < len(storages):
        return None
    return _Returned(layouts=tuple(_layout_of(value) for value in results), is_sequence=is_sequence)


def _takes_flash_attention(tensors: Sequence[torch.Tensor | None], settings: dict[str, Any]) -> bool:
    """Asks the CPU with tensors of the same layout; their memory is never touched, so it is never there."""
    with _disable_current_modes():
        real = [
            None if tensor is None else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            for tensor in tensors
        ]
        choice: int = torch.ops.aten._fused_sdp_choice.default(*real, **settings)
    return choice == _FLASH_ATTENTION


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask to add that attention itself makes of a mask of booleans (``convert_boolean_attn_mask`` in attention.cpp)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=_META))
