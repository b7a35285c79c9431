"""The bytes that an op reads and writes, by its schema and the layout of its tensors."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

Kind = Literal["view", "metadata", "factory", "write", "new"]
_METADATA = ("aten::set_", "aten::resize_", "aten::requires_grad_")
"""They write to a tensor's description, not to its numbers."""
POISON = 255
"""In each byte: not a number in fp64, fp32, fp16 and bf16, -1 in integers."""


@dataclass(frozen=True)
class Span:
    """Bytes of one storage, from the first that a tensor may touch to the last."""

    storage: torch.UntypedStorage
    start: int
    end: int


class Layout:
    """A tensor that is described and not held: its storage may go meanwhile."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = weakref.ref(tensor.untyped_storage())
        self.num_bytes = span_of(tensor).end
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self) -> torch.Tensor | None:
        """The tensor as it was; None where its memory has gone."""
        storage = self.storage()
        if storage is None or storage.nbytes() < self.num_bytes:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._size, self._stride)


@cache
def kind_of(func: Any) -> Kind:
    """view: makes another tensor of the same bytes; factory: makes one without reading any; write: writes to tensors that it is
    given; new: reads some, and returns others."""
    schema = func._schema
    if schema.name.startswith(_METADATA):
        return "metadata"
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return "write"
    if schema.returns and all(value.alias_info is not None for value in schema.returns):
        return "view"
    if schema.name.startswith(("aten::empty", "aten::new_empty")):
        return "factory"
    return "new"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def split_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that an op reads, and tensors that it writes (and may read)."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_written else read).extend(tensors_in(value))
    return read, written


def span_of(tensor: torch.Tensor) -> Span:
    start = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return Span(tensor.untyped_storage(), start, start)
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return Span(tensor.untyped_storage(), start, start + (last + 1) * tensor.element_size())


def poison(tensor: torch.Tensor) -> None:
    """Spoil a tensor's numbers and nothing between them."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.fill_(POISON)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(-1)
