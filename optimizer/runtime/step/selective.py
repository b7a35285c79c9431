"""Recomputation that keeps what was costly: contexts for ``torch.utils.checkpoint`` (its argument ``context_fn``).

In a block's forward the results of products and attention are kept; when the block runs again they are handed out instead of
being computed, so that only cheap ops (norms, activations, rotations, dropout) run twice. The bits are those of keeping.

torch has contexts of its own (``create_selective_checkpoint_contexts``). These differ in five things:

- What is made after the last tensor that autograd saves is not kept, since the second run ends there: a block's last
  product, one tensor of the hidden states' size for each block.
- A result goes as soon as it is handed out, and one that was written to in place is made anew instead of refused.
- Attention with dropout runs again: were it left out, the random numbers drawn after it would be others.
- Products that the model marks as cheap to run again are not kept (``formats/run_again.py``).
- An op that is not kept costs one look-up, not a hash of the op and a call of a policy.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from optimizer.formats.op_costs import classify_op
from optimizer.formats.run_again import is_cheap_to_run_again
from optimizer.runtime.meter.meter import PlainDispatchMode

_DROPOUT = "dropout_p"


def make_selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For one run of one block: entered around its forward, and around its second run in backward."""
    results = _Results()
    return _Saving(results), _Replaying(results)


class _Traits(NamedTuple):
    is_costly: bool
    dropout_index: int
    """Position of the argument with the dropout's probability; -1 where there is none."""


class _OpTable:
    """Facts from the ops' schemas, looked up by id: hashing an op runs Python code of torch's."""

    def __init__(self) -> None:
        self._traits: dict[int, _Traits] = {}
        self._ops: list[Any] = []  # keeps the ids above from being used again

    def __getitem__(self, func: Any) -> _Traits:
        found = self._traits.get(id(func))
        if found is None:
            found = self._traits[id(func)] = _read_traits(func)
            self._ops.append(func)
        return found


_OPS = _OpTable()


def _read_traits(func: Any) -> _Traits:
    names = [argument.name for argument in func._schema.arguments]
    return _Traits(
        is_costly=classify_op(str(func)) in ("matmul", "attention"),
        dropout_index=names.index(_DROPOUT) if _DROPOUT in names else -1,
    )


def _is_kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    traits = _OPS[func]
    if not traits.is_costly or is_cheap_to_run_again():
        return False
    index = traits.dropout_index
    probability = args[index] if 0 <= index < len(args) else kwargs.get(_DROPOUT, 0.0)
    return not probability


class _Result(NamedTuple):
    op: int
    """Its id."""
    value: Any
    versions: list[int]
    """Versions of the tensors when they were made; in-place ops raise them."""


class _Results:
    """Results of the costly ops of one block's forward, in order."""

    def __init__(self) -> None:
        self._results: deque[_Result] = deque()
        self._num_needed = 0

    def add(self, func: Any, value: Any) -> None:
        kept = _detached(value)
        self._results.append(_Result(id(func), kept, _versions_of(kept)))

    def note_saved(self) -> None:
        """Autograd saves a tensor: the second run goes at least as far as this."""
        self._num_needed = len(self._results)

    def drop_unneeded(self) -> None:
        while len(self._results) > self._num_needed:
            self._results.pop()

    def take(self, func: Any) -> Any:
        """The next result; None where the op must run, because none is left or this one was written to since."""
        if not self._results:
            return None
        result = self._results.popleft()
        if result.op != id(func):
            raise RuntimeError(f"a block ran {func} on its second run where its first ran another product or attention")
        return result.value if _versions_of(result.value) == result.versions else None


class _Saving(PlainDispatchMode):
    """Around the first run."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._stack = ExitStack()

    def __enter__(self) -> "_Saving":
        self._stack.enter_context(_watch_saved(self._results.note_saved))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()
        self._results.drop_unneeded()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func._op(*args, **kwargs)
        if _is_kept(func, args, kwargs):
            self._results.add(func, result)
        return result


class _Replaying(PlainDispatchMode):
    """Around the second run."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_kept(func, args, kwargs):
            result = self._results.take(func)
            if result is not None:
                return result
        return func._op(*args, **kwargs)


def _watch_saved(note: Callable[[], None]) -> saved_tensors_hooks:
    """The hooks in force, with ``note`` called before each packing. Only the innermost hooks are called, hence this detour."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003

    def noting(tensor: torch.Tensor) -> Any:
        note()
        return pack(tensor)

    return saved_tensors_hooks(noting, unpack)


def _detached(value: Any) -> Any:
    """Without the graph that autograd will hang on the original, which would else hold itself; with its version counter."""
    if isinstance(value, torch.Tensor):
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003
            return value.detach()
    return tuple(_detached(item) for item in value) if isinstance(value, list | tuple) else value


def _versions_of(value: Any) -> list[int]:
    values = value if isinstance(value, tuple) else (value,)
    return [item._version for item in values if isinstance(item, torch.Tensor)]
