"""Describes what a model is built of, from its config alone: words in, blocks, words out, with their parameters. Torch-free.

A block's parameters are the difference that leaving it out makes to the whole (``parameters.py``), so blocks that differ in size
are distinguished whatever the architecture. Repeated blocks are folded into runs, and runs that repeat into one with a count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.models.parameters import count_parameters
from optimizer.models.schema.fields import Architecture
from optimizer.models.schema.schema import ARCHITECTURES
from optimizer.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block, as far as it can differ from its neighbours."""

    num_parameters: int
    kind: str = ""
    """Kind of its attention where the config distinguishes several: ``sliding_attention``, ``full_attention``."""


@dataclass(frozen=True, kw_only=True)
class AlikeBlocks:
    """Blocks one after the other that are alike."""

    first: int
    """From 1, as is ``last``."""
    last: int
    block: Block

    @property
    def num_blocks(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Runs that come again and again in the same order; mostly one run, once."""

    runs: tuple[AlikeBlocks, ...]
    """Numbered as they come the first time."""
    times: int

    @property
    def num_blocks(self) -> int:
        return self.times * sum(run.num_blocks for run in self.runs)

    @property
    def num_parameters(self) -> int:
        return self.times * sum(run.num_blocks * run.block.num_parameters for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Blocks from one end to the other: of most models the only one, else encoder or decoder."""

    name: str
    folds: tuple[Fold, ...]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A whole model."""

    embedding_parameters: int
    """Parameters of the words alone."""
    stacks: tuple[Stack, ...]
    head_parameters: int
    """Parameters of the output projection; 0 where it shares the embedding's."""
    other_parameters: int
    """Positions, norms outside blocks, what lies between embedding and blocks."""
    facts: tuple[tuple[str, int], ...]
    """Sizes that people compare models by, with their names."""


def describe_structure(spec: ModelSpec) -> Structure:
    """The structure of a listed model. Blocks that share their parameters (our own decoder's ``share_groups``) count
    where they are first."""
    architecture, config = ARCHITECTURES[spec.model_type], spec.config
    stacks = tuple(
        Stack(name=name, folds=_fold(_blocks(spec.model_type, config, key)))
        for name, key in _stack_keys(architecture)
    )
    in_blocks = sum(fold.num_parameters for stack in stacks for fold in stack.folds)
    words = spec.vocab_size * _word_width(config, spec.hidden_size)
    head = 0 if spec.tied_embeddings else words
    return Structure(
        embedding_parameters=words,
        stacks=stacks,
        head_parameters=head,
        other_parameters=spec.num_parameters - in_blocks - words - head,
        facts=tuple(_facts(architecture, config, spec)),
    )


def _stack_keys(architecture: Architecture) -> list[tuple[str, str]]:
    if architecture.num_decoder_blocks_key is None:
        return [("blocks", architecture.num_blocks_key)]
    return [("encoder", architecture.num_blocks_key), ("decoder", architecture.num_decoder_blocks_key)]


def _blocks(model_type: str, config: dict[str, Any], key: str) -> list[Block]:
    kinds = config.get("layer_types") or [""] * config[key]
    if config.get("share_groups"):
        return _shared_blocks(model_type, config, kinds)
    counts = [count_parameters(model_type, {**config, key: number}) for number in range(config[key] + 1)]
    return [Block(num_parameters=more - less, kind=kind) for less, more, kind in zip(counts, counts[1:], kinds, strict=False)]


def _shared_blocks(model_type: str, config: dict[str, Any], kinds: Sequence[str]) -> list[Block]:
    """The first of each group holds the parameters, the others use them."""
    groups = config["share_groups"]
    holders = {sum(groups[:index]) for index in range(len(groups))}
    one = count_parameters(model_type, config) - count_parameters(model_type, {**config, "share_groups": groups[1:]})
    return [
        Block(num_parameters=one, kind=kind) if number in holders else Block(num_parameters=0, kind=f"{kind} shared".strip())
        for number, kind in enumerate(kinds)
    ]


def _fold(blocks: Sequence[Block]) -> tuple[Fold, ...]:
    """The runs; where a few of them repeat from beginning to end, those few and how often."""
    runs = list(_runs(blocks))
    for period in range(2, len(runs) // 2 + 1):
        if len(runs) % period == 0 and all(_alike(run, runs[index % period]) for index, run in enumerate(runs)):
            return (Fold(runs=tuple(runs[:period]), times=len(runs) // period),)
    return tuple(Fold(runs=(run,), times=1) for run in runs)


def _runs(blocks: Sequence[Block]) -> Iterator[AlikeBlocks]:
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[first]:
            yield AlikeBlocks(first=first + 1, last=index, block=blocks[first])
            first = index


def _alike(one: AlikeBlocks, other: AlikeBlocks) -> bool:
    return one.block == other.block and one.num_blocks == other.num_blocks


def _word_width(config: dict[str, Any], hidden_size: int) -> int:
    """Narrower than the blocks in a few models (ELECTRA, small OPT)."""
    return int(config.get("word_embed_proj_dim") or config.get("embedding_size") or hidden_size)


def _facts(architecture: Architecture, config: dict[str, Any], spec: ModelSpec) -> Iterator[tuple[str, int]]:
    yield "hidden size", spec.hidden_size
    yield "attention heads", int(config[architecture.num_heads_key])
    for name, key in (
        ("heads for keys and values", "num_key_value_heads"),
        ("size of the MLP", "intermediate_size"),
        ("experts", architecture.num_experts_key),
        ("sliding window", "sliding_window"),
    ):
        if isinstance(config.get(key), int):
            yield name, int(config[key])
    yield "vocabulary", spec.vocab_size
    yield "longest sequence", spec.max_sequence_length
