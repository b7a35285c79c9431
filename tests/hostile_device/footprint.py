"""The bytes that an op reads and writes, by its schema and the layout of its tensors."""

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["view", "metadata", "factory", "write", "new"]
_METADATA = ("aten::set_", "aten::resize_", "aten::requires_grad_")
"""They write to a tensor's description, not to its numbers."""
POISON = 255
"""In each byte: not a number in fp64, fp32, fp16 and bf16, -1 in integers."""


class Span(NamedTuple):
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
    num_given = len(args)
    for index, (name, is_written) in enumerate(_arguments_of(func)):
        value = args[index] if index < num_given else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            (written if is_written else read).append(value)
        elif isinstance(value, list | tuple):
            (written if is_written else read).extend(tensors_in(value))
    return read, written


@cache
def name_of(func: Any) -> str:
    """Return an op's name, such as ``aten::copy_``. It is kept: asking torch takes longer than noting an access."""
    return str(func._schema.name)


@cache
def _arguments_of(func: Any) -> tuple[tuple[str, bool], ...]:
    """Names, and whether they are written to."""
    return tuple(
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write) for argument in func._schema.arguments
    )


def span_of(tensor: torch.Tensor) -> Span:
    item_bytes, num_elements = tensor.element_size(), tensor.numel()
    start = tensor.storage_offset() * item_bytes
    if num_elements and not tensor.is_contiguous():
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return Span(tensor.untyped_storage(), start, start + num_elements * item_bytes)


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
