"""An GenerationProfile: what one forward pass of batch generation does, in numbers, for any batch and any length.

Torch-free and JSON-able; ``trace/generation.py`` makes one. Two phases are held: the prefill, whose sizes are polynomials in
batch and prompt length, and the decode of one token, in batch and the number of tokens it sees, itself included; of that also
what is left on the device where attention is computed on the host. Each runs through parts: the embedding, the blocks, the
head. Each distinct block is held once, whatever the depth.

Keys and values are not in the traced sizes: how many elements a block keeps by token, and within which window, is exact by
itself, and how many tokens there is room for is the plan's and the workload's business. Where in a block's first run they
come is ``kv_after``. Of models whose hidden states weigh less than keys and values, how these are made again of those is a third
phase. Regimes, and what is not modelled, are as in ``profile.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from optimizer.base.errors import InvalidModel, InvalidPlan, InvalidWorkload
from optimizer.base.serialize import from_json, to_json
from optimizer.formats.kv_prefix import can_rebuild
from optimizer.plan.kv_cache import AttentionPlace
from optimizer.profile.extent import traced_representation
from optimizer.profile.ops import EMBEDDING, HEAD, Change, Op, Part
from optimizer.profile.profile import Regime, not_profiled
from optimizer.profile.sizes import Shape
from optimizer.profile.trained import BaseSizes

GENERATION_PROFILE_VERSION: Final = 12


def block_part(template: int) -> str:
    """Name of a block's part in ``Regime.parts``."""
    return f"block {template}"


@dataclass(frozen=True, kw_only=True)
class KvTensors:
    """Keys and values of one distinct block."""

    elements_per_token: int
    """Elements of keys and values together, for each sequence."""
    window: int | None
    """Tokens kept at most, of a sliding window; None keeps all."""
    num_heads: int
    """Heads of keys and values."""
    key_dim: int
    """Channels of a head's keys."""

    @property
    def value_dim(self) -> int:
        """Channels of a head's values."""
        return self.elements_per_token // self.num_heads - self.key_dim

    def num_elements(self, num_tokens: int) -> int:
        """Elements kept of so many tokens, for each sequence."""
        kept = num_tokens if self.window is None else min(num_tokens, self.window)
        return self.elements_per_token * kept


@dataclass(frozen=True, kw_only=True)
class EndBytes:
    """Bytes of what the first or the last stage of a model alone needs, and of the rows that stand in for it on the others."""

    embeddings: int
    """All embeddings outside the blocks, the head among them where it is tied to one."""
    embedding_rows: int
    head: int
    """The output projection's matrix, wherever it is."""
    head_row: int
    is_tied: bool
    """True if the head is one of the embeddings."""

    def left_out(self, *, is_first: bool, is_last: bool) -> int:
        """Bytes that a stage holds less of what belongs to no block than a whole model does."""
        tied = self.head if self.is_tied else 0
        less = 0 if is_first else self.embeddings - self.embedding_rows - (tied if is_last else 0)
        return less + (0 if is_last else self.head - tied - self.head_row)


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of all weights in one representation: packed or not, with their scales."""

    outside: int
    """Bytes of what belongs to no block or to several: embedding, final norm, head, what blocks share. Always on the
    device."""
    tensors: tuple[tuple[int, ...], ...]
    """Distinct blocks, each tensor of theirs. What streams where ``weights.place`` is not the device."""
    staying_by_block: tuple[int, ...]
    """Distinct blocks' buffers, which stay on the device."""
    ends: EndBytes | None = None
    """The part of ``outside`` that stages of a model do not all need; None where blocks share weights: it cannot be cut."""

    @property
    def by_block(self) -> tuple[int, ...]:
        """Distinct blocks, of ``tensors``."""
        return tuple(sum(sizes) for sizes in self.tensors)


@dataclass(frozen=True, kw_only=True)
class ForwardRegime(Regime):
    """A range of batches and lengths (in the fields of ``Regime``) over which a phase's ops are the same."""

    kv_after: tuple[int, ...]
    """Op of each distinct block's part after which its keys and values come, where they are not there yet."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Prefill or decode."""

    ops: tuple[Op, ...]
    """Distinct ones, as are the next two."""
    changes: tuple[Change, ...]
    parts: tuple[Part, ...]
    regimes: dict[str, tuple[ForwardRegime, ...]]
    """Regimes by representation of the weights (``WeightsPlan.representation``)."""
    length_multiple: int = 1
    """Lengths are multiples of this: the block of attention that runs in blocks."""

    def regime(self, representation: str, shape: Shape) -> ForwardRegime:
        """The regime that holds at a batch and a length.

        Raises InvalidPlan for a representation that was not profiled, InvalidWorkload for lengths outside all regimes.
        """
        regimes = self.regimes.get(traced_representation(representation))
        if regimes is None:
            raise not_profiled(representation, known=list(self.regimes))
        if shape[1] % self.length_multiple:
            raise InvalidWorkload(
                f"workload.prompt_length is {shape[1]:,}; this model's attention runs in blocks of "
                f"{self.length_multiple:,} tokens: use a multiple of it",
                field="workload.prompt_length",
                value=shape[1],
                allowed={"multiple_of": self.length_multiple},
            )
        found = next((regime for regime in regimes if regime.covers(shape)), None)
        if found is not None:
            return found
        low, high = min(each.sequence_low for each in regimes), max(each.sequence_high for each in regimes)
        raise InvalidWorkload(
            f"{shape[1]:,} tokens were asked for; this model was profiled for {low:,} to {high:,}",
            field="workload.prompt_length",
            value=shape[1],
            allowed={"minimum": low, "maximum": high},
        )


@dataclass(frozen=True, kw_only=True)
class HostAttended:
    """Decoding where attention is computed on the host (``runtime/generation/kv_host_attention.py``)."""

    decode: Phase
    """The part that runs on the device: its sizes do not depend on the tokens that are seen."""
    num_query_heads: tuple[int, ...]
    """Heads of queries, by distinct block."""
    caps_scores: tuple[bool, ...]
    """Flags by distinct block: whether there is a soft cap on scores."""


@dataclass(frozen=True, kw_only=True)
class GenerationProfile:
    """All that planning needs to know of a model that generates."""

    version: Literal[12] = GENERATION_PROFILE_VERSION
    model_fingerprint: str
    model_type: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    max_sequence_length: int
    torch_version: str
    block_kinds: tuple[int, ...]
    """Number of the distinct block that each block of the model is."""
    kv: tuple[KvTensors, ...]
    """Keys and values by distinct block."""
    weights: dict[str, WeightBytes]
    """Bytes of weights by representation; read it with ``weight_bytes``, which knows that fp16 weighs what bf16 does."""
    prefill: Phase
    decode: Phase
    rebuild: Phase | None = None
    """Keys and values of a prompt's first tokens made again (``runtime/generation/kv_prefix.py``), in batch and the
    number of these tokens. Of its parts the embedding makes the copies of positions, which stay; the head, and blocks
    that cannot do it, do nothing. None where no block can."""
    on_host: HostAttended | None = None
    """Decoding with attention on the host; None where the model attends in code of its own."""
    base: BaseSizes | None = None
    """Every tensor of the model, from which loading is predicted; None in documents from before it was kept."""
    weights_dtype: str = ""
    """Dtype that the config says its files have: ``bfloat16``; empty where it says none."""

    def decode_with(self, attention: AttentionPlace) -> Phase:
        """Raises InvalidPlan for attention on the host where the model has none."""
        if attention == "device":
            return self.decode
        if self.on_host is None:
            raise InvalidPlan(
                f"plan.kv_cache.attention is host; {self.model_type} attends in code of its own, which runs on the device alone",
                field="plan.kv_cache.attention",
                value=attention,
                allowed=["device"],
            )
        return self.on_host.decode

    @property
    def representations(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def weight_bytes(self, representation: str) -> WeightBytes:
        """Raises InvalidPlan for a representation that was not profiled."""
        found = self.weights.get(traced_representation(representation))
        if found is None:
            raise not_profiled(representation, known=list(self.weights))
        return found

    def with_blocks(self, kept: Sequence[int]) -> "GenerationProfile":
        """The profile of a model with these blocks alone, in rising order, and all that is outside the blocks."""
        if len(kept) == self.num_blocks:
            return self

        def cut(phase: Phase) -> Phase:
            regimes = {
                name: tuple(
                    replace(regime, block_templates=tuple(regime.block_templates[block] for block in kept))
                    for regime in found
                )
                for name, found in phase.regimes.items()
            }
            return replace(phase, regimes=regimes)

        return replace(
            self,
            num_blocks=len(kept),
            block_kinds=tuple(self.block_kinds[block] for block in kept),
            prefill=cut(self.prefill),
            decode=cut(self.decode),
            on_host=None if self.on_host is None else replace(self.on_host, decode=cut(self.on_host.decode)),
            rebuild=None if self.rebuild is None else cut(self.rebuild),
        )

    def can_rebuild(self, kind: int) -> bool:
        """True where keys and values of a distinct block may be made again of hidden states."""
        tensors = self.kv[kind]
        return can_rebuild(
            window=tensors.window, hidden_size=self.hidden_size, elements_per_token=tensors.elements_per_token
        )

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "GenerationProfile":
        """Raises InvalidModel, which names the first field that is wrong or points to nothing."""
        profile = from_json(cls, document, path="profile", error=InvalidModel)
        for name in ("prefill", "decode", "rebuild"):
            phase = getattr(profile, name)
            if phase is not None:
                profile._check_phase(f"profile.{name}", phase)
        if profile.on_host is not None:
            profile._check_phase("profile.on_host.decode", profile.on_host.decode)
            for name in ("num_query_heads", "caps_scores"):
                num_found = len(getattr(profile.on_host, name))
                if num_found != len(profile.kv):
                    raise InvalidModel(
                        f"profile.on_host.{name} has {num_found} entries; there are {len(profile.kv)} distinct blocks",
                        field=f"profile.on_host.{name}",
                        value=num_found,
                        allowed=len(profile.kv),
                    )
        _check("profile.block_kinds", profile.block_kinds, high=len(profile.kv))
        if profile.base is not None and len(profile.base.by_block) != len(profile.kv):
            raise InvalidModel(
                f"profile.base.by_block has {len(profile.base.by_block)} entries; there are {len(profile.kv)} distinct blocks",
                field="profile.base.by_block",
                value=len(profile.base.by_block),
                allowed=len(profile.kv),
            )
        return profile

    def _check_phase(self, path: str, phase: Phase) -> None:
        for index, part in enumerate(phase.parts):
            _check(f"{path}.parts[{index}].ops", part.ops, high=len(phase.ops))
            _check(f"{path}.parts[{index}].changes", part.changes, high=len(phase.changes))
        names = {EMBEDDING, HEAD, *(block_part(kind) for kind in range(len(self.kv)))}
        for representation, regimes in phase.regimes.items():
            for index, regime in enumerate(regimes):
                where = f"{path}.regimes.{representation}[{index}]"
                _check(f"{where}.parts", tuple(regime.parts.values()), high=len(phase.parts))
                if regime.parts.keys() != names:
                    raise InvalidModel(
                        f"{where}.parts are {', '.join(regime.parts)}; needed: {', '.join(sorted(names))}",
                        field=f"{where}.parts",
                        value=list(regime.parts),
                        allowed=sorted(names),
                    )


def _check(path: str, indices: tuple[int, ...], *, high: int) -> None:
    wrong = [index for index in indices if not 0 <= index < high]
    if wrong:
        raise InvalidModel(
            f"{path} points to {wrong[0]}; there are 0 to {high - 1}",
            field=path,
            value=wrong[0],
            allowed=f"0 to {high - 1}",
        )
