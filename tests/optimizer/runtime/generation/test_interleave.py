"""Forward passes take turns block by block."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.base.errors import MissingExtra
from optimizer.plan.generation import GenerationPlan
from optimizer.runtime.generation.generator import Generator
from optimizer.runtime.generation.interleave import Turns
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.test_generator import build


class Block(nn.Module):
    def __init__(self, name: str, seen: list[Any]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def forward(self, who: str) -> str:
        self.seen.append((self.name, who))
        if (self.name, who) == ("second", "bad"):
            raise RuntimeError("second block")
        return who


class Backbone(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block("first", seen), Block("second", seen)])

    def forward(self, who: str) -> str:
        for block in self.blocks:
            who = block(who)
        return who


@pytest.fixture
def seen() -> list[Any]:
    return []


def run(seen: list[Any], names: list[str]) -> None:
    backbone = Backbone(seen)
    turns = Turns(resumed=lambda: seen.append("resumed"))
    handles = turns.watch(backbone, list(backbone.blocks))

    def forward(who: str) -> None:
        backbone(who)
        seen.append(("head", who))

    try:
        turns.run([partial(forward, who) for who in names])
    finally:
        for handle in handles:
            handle.remove()


def test_each_block_runs_for_all_before_the_next_and_heads_come_last(seen: list[Any]) -> None:
    run(seen, ["a", "b", "c"])
    order = [each for each in seen if each != "resumed"]
    assert order == [(part, who) for part in ("first", "second", "head") for who in ("a", "b", "c")]
    assert seen.count("resumed") == 9


def test_one_alone_is_simply_called(seen: list[Any]) -> None:
    run(seen, ["a"])
    assert seen == [("first", "a"), ("second", "a"), ("head", "a")]


def test_an_error_of_one_ends_the_others_where_they_are(seen: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="second block"):
        run(seen, ["a", "bad", "c"])
    assert [each for each in seen if each != "resumed"] == [
        ("first", "a"), ("first", "bad"), ("first", "c"), ("second", "a"), ("second", "bad"),
    ]  # fmt: skip
    run(seen, ["d", "e"])
    assert seen[-1] == ("head", "e")


def test_without_greenlet_several_micro_batches_name_the_extra_and_one_needs_none(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    model = build(SMALL_CONFIGS["llama"])
    cpu = torch.device("cpu")
    with pytest.raises(MissingExtra, match="a pass of several micro-batches needs the package 'greenlet'") as caught:
        Generator(model, plan=GenerationPlan(num_micro_batches=2), device=cpu)
    assert caught.value.hint == "pip install 'headroom[greenlet]'"
    Generator(model, plan=GenerationPlan(), device=cpu).close()
