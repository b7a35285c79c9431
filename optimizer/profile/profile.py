"""A Profile: what one training micro-batch of a model does, in numbers, for any micro-batch size and sequence length.

Torch-free and JSON-able; ``trace/trace.py`` makes one. A micro-batch runs through parts: the embedding, the blocks, the head with
the loss, and back. Each distinct block is held once as a template, and ``block_templates`` says which block is an instance of
which; first and last blocks are templates of their own only where they differ.

Each template is held once per choice of the activations row, as the runtime carries it out: a recomputed block's
backward begins with
its forward again. What differs with the shape (a micro-batch of one needs no sum over the batch; a sliding window
changes the mask
once the sequence is longer) is held as separate regimes. Scratch that a kernel allocates and frees inside one op is listed beside
the changes, of ops on the CPU (``meta_ops/op_scratch.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from optimizer.base.categories import Category
from optimizer.base.errors import InvalidModel, InvalidPlan, InvalidWorkload, NotProfiled
from optimizer.base.serialize import from_json, to_json
from optimizer.plan.activations import COMPILED, NOT_COMPILED, BlockChoice
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.profile.extent import Extent, traced_choice, traced_representation
from optimizer.profile.ops import Change, Op, Part
from optimizer.profile.sizes import Shape, Terms
from optimizer.profile.trained import BaseSizes, FrozenBytes, Tensors
from optimizer.workload import TrainingObjective

PROFILE_VERSION: Literal[14] = 14
BLOCK_CHOICES: tuple[BlockChoice, ...] = ("keep", "recompute", "selective", "offload")
"""Choices of blocks that are traced; the other ways of offloading are priced from ``offload``: only where the bytes go
differs."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """The time that a block needs a shared storage."""

    index: int
    """Index of one of the regime's ``shared`` storages."""
    until: int
    """Op of the block's backward after which the block lets go."""


@dataclass(frozen=True, kw_only=True)
class BlockTemplate:
    """One distinct block under one choice. The first block's backward includes the embedding's, the last block's
    forward the final norm."""

    forward: int
    """Index in the profile's ``parts`` of the forward; the next two are indices there, too."""
    backward_first: int
    """The part where the parameters have no gradient yet."""
    backward_accumulate: int
    """The part where gradients are there and are added to."""
    holds: tuple[Hold, ...]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A storage that more than one block decides about: rotary tables, masks, a first block's input that the model keeps, what
    an encoder gives every block of the decoder.

    The prologue makes it, or a block's part of the forward pass. It goes where its last holder lets go in backward; if no block
    of a plan holds it, in the forward pass.
    """

    num_bytes: Terms
    category: Category
    ends_in: int = -1
    """Template in whose forward part it goes if no block holds it, one that a single block is an instance of; -1: after all
    blocks."""
    ends_before: int = 0
    """The number of that part's ops that come after."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A micro-batch forward without gradients or dropout, as indices in the profile's ``parts``. Nothing is held back by it."""

    prologue: int
    blocks: tuple[int, ...]
    """Parts of blocks by template, as ``Regime.block_templates`` counts them."""
    head: int


@dataclass(frozen=True, kw_only=True)
class BlockSums:
    """Sums of hidden states in one micro-batch, of ranks that share each block (``runtime/ranks/tensor/blocks.py``)."""

    num_ranks: int
    """Ranks that share each block, 2 or more."""
    forward: int
    """Sums of each block's results."""
    backward: int
    """Sums of gradients, of each block but the first."""
    first_backward: int
    """Sums of gradients of the first block, whose input may need none."""
    again: dict[str, int]
    """Sums of a block's results that its backward makes once more, by choice (BLOCK_CHOICES); none of choices left out."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The model over a range of shapes in which its ops are the same."""

    micro_batch_low: int
    micro_batch_high: int
    sequence_low: int
    sequence_high: int
    parts: dict[str, int]
    """All that is not a block (see PART_NAMES), as indices in the profile's ``parts``."""
    shared: tuple[Shared, ...]
    templates: dict[str, tuple[BlockTemplate, ...]]
    """Templates by choice (BLOCK_CHOICES)."""
    block_templates: tuple[int, ...]
    """Template of each block of the model, first to last."""
    evaluation: Evaluation | None = None
    """The evaluation's parts; None where it was not traced."""

    def templates_of(self, choice: BlockChoice) -> tuple[BlockTemplate, ...]:
        """Raises NotProfiled where the choice was not traced."""
        found = self.templates.get(traced_choice(choice))
        if found is None:
            raise NotProfiled(f"blocks that {choice}")
        return found

    def covers(self, shape: Shape) -> bool:
        batch, sequence = shape
        return (
            self.micro_batch_low <= batch <= self.micro_batch_high
            and self.sequence_low <= sequence <= self.sequence_high
        )


PART_NAMES = (
    "prologue",
    "head",
    "head_backward_first",
    "head_backward_accumulate",
    "norm_backward_first",
    "norm_backward_accumulate",
)
"""``prologue`` is inputs and embedding, ``head`` the output projection and the loss, ``norm_backward`` what lies
between the head and
the last block. ``_first``: the parameters have no gradient yet; ``_accumulate``: they do."""


def tail_name(part: str, choice: BlockChoice) -> str:
    """Name of a part that follows the last block, where that depends on the last block's choice: of plain modules, not of
    language models.
    """
    return part if choice == "keep" else f"{part} after {choice}"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that planning needs to know of a model, or of a model with adapters.

    With adapters ``tensors`` holds the adapters alone, and ``frozen`` the rest; without, every weight is trained and ``frozen``
    is empty.
    """

    version: Literal[14] = PROFILE_VERSION
    model_fingerprint: str
    model_type: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    max_sequence_length: int
    is_padded: bool = False
    """Traced with an attention mask that hides some token: other kernels, and the mask itself."""
    is_packed: bool = False
    """Traced with positions that start over within a row, and so with the mask that parts its samples."""
    objective: TrainingObjective = "next_token"
    """The objective whose loss was traced; with dpo and orpo each of a micro-batch's sequences is a pair, in two rows."""
    is_partial: bool = False
    """Less than everything was traced (``extent.py``): some representations, choices or ranges are not there. Asking for
    those raises NotProfiled."""
    input_bytes: int | None = None
    """Bytes of one sequence's inputs and labels, of a module whose inputs are no token ids; None: ids and labels of 8
    bytes a token."""
    sequence_multiple: int = 1
    """Sequences are multiples of this: the block of attention that runs in blocks."""
    has_plain_head: bool = True
    """The head is one projection of the last hidden state, so that the loss can be made in chunks."""
    clamps_fp16: bool = False
    """Blocks do more in fp16 than in bf16, whose sizes stand for both elsewhere."""
    is_held_to_measurement: bool = True
    """Tests hold predictions for this model type to measured steps. False for one that transformers knows and this program has
    no list of keys for: traced by the same means, checked by nobody."""
    torch_version: str
    tensors: Tensors
    buffer_bytes: dict[str, int]
    """Bytes of buffers by dtype: rotary tables and the like, which count as weights."""
    frozen: dict[str, FrozenBytes] = field(default_factory=dict)
    """Frozen bytes by representation, as ``regimes``; read it with ``frozen_bytes``, which knows that fp16 weighs what
    bf16 does."""
    base: BaseSizes | None = None
    """Every tensor of the model as it is without adapters; None for a module that was traced as it is."""
    weights_dtype: str = ""
    """Dtype that the config says its files have: ``bfloat16``; empty where it says none."""
    ops: tuple[Op, ...]
    """Distinct ones, as are the next two."""
    changes: tuple[Change, ...]
    parts: tuple[Part, ...]
    regimes: dict[str, tuple[Regime, ...]]
    """Regimes by representation of the weights (``WeightsPlan.representation``)."""
    sums: BlockSums | None = None
    """The sums of a model that is one of several ranks', which share each block; None of a whole model."""
    narrower: tuple["Profile", ...] = ()
    """Beside a whole model, those of one of several ranks that share each block, as far as they were traced."""

    @cached_property
    def has_sparse_gradients(self) -> bool:
        """True where some embedding's gradients hold only the rows of a batch's tokens."""
        return any(tensor.row_elements for tensor in self.tensors.in_order())

    @property
    def num_inputs(self) -> int:
        """Tensors of 8 bytes a token that come with each micro-batch: ids, labels and, if there are any, masks or positions;
        both rows' of pairs.
        """
        if self.objective != "next_token":
            return 4
        return 3 if self.is_padded or self.is_packed else 2

    @property
    def num_parameters(self) -> int:
        """Trained ones."""
        return sum(tensor.num_elements for tensor in self.tensors.in_order())

    @property
    def num_sharing(self) -> int:
        """Ranks that share each block of this model; 1 of a whole one."""
        return 1 if self.sums is None else self.sums.num_ranks

    def of_layout(self, layout: DeviceLayout) -> "Profile":
        """The profile of what a rank of a layout runs. Raises InvalidPlan where ranks share each block as was not traced."""
        found = next((each for each in (self, *self.narrower) if each.num_sharing == layout.tensor), None)
        if found is None:
            known = ", ".join(str(each.num_sharing) for each in (self, *self.narrower))
            why = f"{known}: other parts of blocks are traced where goal.pins.layout.tensor asks for them"
            raise InvalidPlan(
                f"plan.layout.tensor is {layout.tensor}; allowed by this profile: {why}",
                field="plan.layout.tensor",
                value=layout.tensor,
                allowed=why,
            )
        return found

    def frozen_bytes(self, representation: str) -> FrozenBytes:
        """Bytes of the weights that are not trained; all zero where every weight is trained. Raises InvalidPlan for a
        representation that was not profiled.
        """
        if not self.frozen:
            return FrozenBytes(outside=0, by_block=(0,) * len(self.tensors.by_block))
        name = traced_representation(representation)
        if name not in self.frozen:
            raise self._not_profiled(representation)
        return self.frozen[name]

    def total_frozen_bytes(self, representation: str) -> int:
        """Bytes of the whole model's frozen weights."""
        frozen = self.frozen_bytes(representation)
        return frozen.outside + sum(frozen.by_block[kind] for kind in self.tensors.block_kinds)

    def regime(self, representation: str, shape: Shape) -> Regime:
        """The regime that holds at a micro-batch size and sequence length.

        fp16 has the sizes of bf16, in autocast as well. Raises InvalidWorkload beyond the position table, InvalidPlan for a
        representation that was not profiled.
        """
        name = traced_representation(representation)
        if name not in self.regimes:
            raise self._not_profiled(representation)
        if shape[1] % self.sequence_multiple:
            raise not_in_blocks(shape[1], multiple=self.sequence_multiple, high=self.max_sequence_length)
        for regime in self.regimes[name]:
            if regime.covers(shape):
                return regime
        if self.is_partial:
            raise NotProfiled(f"micro-batches of {shape[0]:,} sequences of {shape[1]:,} tokens")
        low = min(regime.sequence_low for regime in self.regimes[name])
        raise beyond_positions(shape[1], low=low, high=self.max_sequence_length)

    def covers(self, extent: Extent) -> bool:
        """True where all that is asked for was traced, and for what no profile can hold: asking for that is another error."""
        if not self.is_partial:
            return True
        if extent.representations is None or extent.choices is None or extent.shapes is None:
            return False
        for name in map(traced_representation, extent.representations):
            choices = [choice for choice in extent.choices if not name.endswith(COMPILED) or choice not in NOT_COMPILED]
            for shape in extent.shapes:
                found = [regime for regime in self.regimes.get(name, ()) if regime.covers(shape)]
                if not found or not set(choices) <= set(found[0].templates):
                    return False
        return True

    def _not_profiled(self, representation: str) -> InvalidPlan | NotProfiled:
        if self.is_partial:
            return NotProfiled(f"{representation} weights")
        return not_profiled(representation, known=list(self.regimes))

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Profile":
        """Raises InvalidModel, which names the first field that is wrong or points to nothing."""
        profile = from_json(cls, document, path="profile", error=InvalidModel)
        profile._check_indices()
        return profile

    def _check_indices(self) -> None:
        for index, part in enumerate(self.parts):
            path = f"profile.parts[{index}]"
            _check_range(f"{path}.ops", part.ops, high=len(self.ops))
            _check_range(f"{path}.changes", part.changes, high=len(self.changes))
            _check_range(f"{path}.changes_at", part.changes_at, low=-1, high=len(part.ops))
            if len(part.changes_at) != len(part.changes):
                raise InvalidModel(
                    f"{path}.changes_at has {len(part.changes_at)} entries; there are {len(part.changes)} changes",
                    field=f"{path}.changes_at",
                    value=len(part.changes_at),
                    allowed=len(part.changes),
                )
        for dtype, regimes in self.regimes.items():
            if not regimes:
                path = f"profile.regimes.{dtype}"
                raise InvalidModel(f"{path} is empty; at least one range of shapes is needed", field=path, value=0)
            for index, regime in enumerate(regimes):
                self._check_regime(f"profile.regimes.{dtype}[{index}]", regime)

    def _check_regime(self, path: str, regime: Regime) -> None:
        if len(regime.block_templates) != self.num_blocks:
            raise InvalidModel(
                f"{path}.block_templates has {len(regime.block_templates)} entries; there are {self.num_blocks} blocks",
                field=f"{path}.block_templates",
                value=len(regime.block_templates),
                allowed=self.num_blocks,
            )
        ends = tuple(shared.ends_in for shared in regime.shared)
        _check_range(f"{path}.shared", ends, low=-1, high=len(regime.templates[BLOCK_CHOICES[0]]))
        _check_range(f"{path}.parts", tuple(regime.parts.values()), high=len(self.parts))
        if (evaluation := regime.evaluation) is not None:
            indices = (evaluation.prologue, evaluation.head, *evaluation.blocks)
            _check_range(f"{path}.evaluation", indices, high=len(self.parts))
            _check_range(f"{path}.block_templates", regime.block_templates, high=len(evaluation.blocks))
        for choice, templates in regime.templates.items():
            _check_range(f"{path}.block_templates", regime.block_templates, high=len(templates))
            for index, template in enumerate(templates):
                parts = (template.forward, template.backward_first, template.backward_accumulate)
                held = tuple(hold.index for hold in template.holds)
                _check_range(f"{path}.templates.{choice}[{index}]", parts, high=len(self.parts))
                _check_range(f"{path}.templates.{choice}[{index}].holds", held, high=len(regime.shared))


def not_profiled(representation: str, *, known: Sequence[str]) -> InvalidPlan:
    if representation.endswith(COMPILED):
        why = "op by op: this profile holds no compiled blocks, which are traced where they are asked for by name"
        return InvalidPlan(
            f"plan.kernels.blocks is compiled; allowed: {why}", field="plan.kernels.blocks", value="compiled", allowed=why
        )
    return InvalidPlan(
        f"plan.weights are {representation}, which this profile does not know; known: {', '.join(known)}",
        field="plan.weights",
        value=representation,
        allowed=list(known),
    )


def not_in_blocks(sequence_length: int, *, multiple: int, high: int) -> InvalidWorkload:
    return InvalidWorkload(
        f"workload.sequence_length is {sequence_length:,}; this model's attention runs in blocks of "
        f"{multiple:,} tokens: use a multiple of it",
        field="workload.sequence_length",
        value=sequence_length,
        allowed={"multiple_of": multiple, "maximum": high},
    )


def beyond_positions(sequence_length: int, *, low: int, high: int) -> InvalidWorkload:
    return InvalidWorkload(
        f"workload.sequence_length is {sequence_length:,}; this model has positions for {low:,} to {high:,} tokens",
        field="workload.sequence_length",
        value=sequence_length,
        allowed={"minimum": low, "maximum": high},
    )


def _check_range(path: str, indices: tuple[int, ...], *, high: int, low: int = 0) -> None:
    wrong = [index for index in indices if not low <= index < high]
    if wrong:
        raise InvalidModel(
            f"{path} points to {wrong[0]}; there are {low} to {high - 1}",
            field=path,
            value=wrong[0],
            allowed=f"{low} to {high - 1}",
        )
