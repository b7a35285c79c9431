"""Shapes are compiled by several threads at once, as in a web process that answers several questions."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.estimate.shape import compiled
from optimizer.plan.weights import WeightsPlan


class Traced:
    """Stands for a profile, of which nothing is read here."""


class Disturbed(dict[Any, Any]):
    """Another thread drops what was just named as the oldest."""

    def __iter__(self) -> Iterator[Any]:
        for key in [*self.keys()]:
            self.pop(key, None)
            yield key


def test_a_shape_that_another_thread_has_dropped_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CompiledShape", lambda _, *, shape, **more: SimpleNamespace(shape=shape))
    monkeypatch.setattr(compiled, "_compiled", Disturbed())
    monkeypatch.setattr(compiled, "_MAX_CACHED", 4)
    profile: Any = Traced()
    for length in range(1, 20):
        assert compiled.compile_shape(profile, WeightsPlan(), (1, length)).shape == (1, length)
        assert len(compiled._compiled) <= 4
