"""The work that is asked for: training or generation. A plan decides how it is done, a goal which limits it must meet."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from optimizer.base.errors import InvalidWorkload
from optimizer.base.ranges import require_float, require_int
from optimizer.base.shown import shown_value
from optimizer.optimizers import OPTIMIZER_NAMES, KeptState, OptimizerName

ScheduleName = Literal["constant", "linear", "cosine"]
Packing = Literal["wrapped", "best_fit", "off"]
LossOn = Literal["all", "assistant"]
TrainingObjective = Literal["next_token", "dpo", "orpo"]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank adapters (LoRA) beside frozen weights; they are trained in place of the model's own weights."""

    rank: int = 8
    """Inner dimension of each pair of adapter matrices, 1 to 1,024."""
    alpha: float = 16.0
    """The adapters' product is scaled by ``alpha / rank``."""
    dropout: float = 0.0
    """Dropout on the adapters' input, 0 to below 1."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters (``q_proj``); empty for every matrix inside the blocks."""

    def __post_init__(self) -> None:
        require_int("adapter.rank", self.rank, low=1, high=1024)
        require_float("adapter.alpha", self.alpha, low=0, high=65_536, low_allowed=False)
        require_float("adapter.dropout", self.dropout, low=0, high=0.99)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Choices for writing the trained weights at the end of a job."""

    dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """same keeps the dtype that was trained."""
    max_shard_bytes: int = 5_000_000_000
    """Tensors are spread over files of at most this size, each tensor whole."""
    adapter: Literal["alone", "merged", "both"] = "both"
    """With adapters: the adapters' own folder (as peft reads it), the model with them added in, or both."""
    gguf: Literal["none", "f16", "q8_0"] = "none"
    """A GGUF file beside them, of the whole model with its adapters added in, for llama.cpp: Llama, Mistral, Qwen 2 and 3,
    Gemma 1 to 3."""

    def __post_init__(self) -> None:
        require_int("export.max_shard_bytes", self.max_shard_bytes, low=1_000_000, high=2**40)


@dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """A training job: pre-training from scratch, or full fine-tuning from given weights."""

    mode: Literal["pretrain", "finetune"] = "pretrain"
    """pretrain starts from random weights drawn with ``seed``; finetune needs a model with weights."""
    sequence_length: int = 512
    """Tokens in a row, 8 to 131,072."""
    packing: Packing = "wrapped"
    """wrapped cuts the stream of all texts into rows, each token beside those of its neighbours. best_fit puts whole samples into
    rows, never two halves, and none attends to another. off gives each sample a row of its own, padded at the end."""
    loss_on: LossOn = "all"
    """assistant learns answers and completions alone, of whole samples; plain texts are learnt whole."""
    objective: TrainingObjective = "next_token"
    """next_token learns texts. dpo and orpo learn from pairs of a better and a worse answer to one prompt: dpo by how much
    likelier each has become than under the model without its adapters, orpo by the odds of one against the other beside the
    better one's loss, with no reference."""
    beta: float = 0.1
    """Weight of the preference, above 0 to 100: dpo's scale of log-probability ratios, orpo's factor of the odds ratio's loss."""
    global_batch_size: int = 8
    """Sequences per optimizer step, however they are split into micro-batches; with dpo and orpo pairs of them."""
    num_steps: int = 100
    """Optimizer steps."""
    learning_rate: float = 3e-4
    """Peak learning rate, above 0 and at most 1."""
    schedule: ScheduleName = "cosine"
    """Shape after the warm-up; linear and cosine end at a tenth of the peak."""
    warmup_steps: int = 0
    """Steps of linear warm-up, less than ``num_steps``."""
    optimizer: OptimizerName = "adamw"
    """adamw keeps two moments of each weight, sgd one, or none without momentum (not Nesterov's), lion one, and adafactor a
    number for each row and column of a matrix. A learning rate is right for one of them only: lion's is a third to a tenth of
    adamw's, adafactor's is a share of each tensor's own size, 0.01 in torch."""
    momentum: float = 0.9
    """Momentum of sgd, 0 to below 1; at 0 it keeps no state. adamw has beta1."""
    weight_decay: float = 0.1
    """Applied to tensors of two or more dimensions. sgd: added to the gradient, as torch's does; the others: decoupled."""
    beta1: float = 0.9
    """Read by adamw and lion, like the next."""
    beta2: float = 0.95
    epsilon: float = 1e-8
    """Read by adamw alone."""
    max_grad_norm: float | None = 1.0
    """Global gradient norm is clipped to this; None turns clipping off."""
    seed: int = 0
    """Fixes initial weights, data order and dropout."""
    eval_every_steps: int = 50
    """Validation loss is measured at step 0, at each multiple, and at the end; 0 means start and end only."""
    eval_batches: int = 8
    """Global batches of the validation split per evaluation; the same sequences for every plan."""
    checkpoint_every_steps: int = 50
    """A resumable checkpoint is kept at each multiple; 0 means only when asked to stop."""
    sample_tokens: int = 120
    """Tokens of text generated from the trained model at the end; 0 for none."""
    adapter: Adapter | None = None
    """None trains every weight."""
    export: Export = field(default_factory=Export)

    def __post_init__(self) -> None:
        require_int("sequence_length", self.sequence_length, low=8, high=131_072)
        require_int("global_batch_size", self.global_batch_size, low=1, high=1_000_000)
        require_int("num_steps", self.num_steps, low=1, high=100_000_000)
        require_int("warmup_steps", self.warmup_steps, low=0, high=self.num_steps - 1)
        require_int("seed", self.seed, low=0, high=2**63 - 1)
        require_int("eval_every_steps", self.eval_every_steps, low=0, high=100_000_000)
        require_int("eval_batches", self.eval_batches, low=1, high=10_000)
        require_int("checkpoint_every_steps", self.checkpoint_every_steps, low=0, high=100_000_000)
        require_int("sample_tokens", self.sample_tokens, low=0, high=4_096)
        require_float("learning_rate", self.learning_rate, low=0, high=1, low_allowed=False)
        require_float("weight_decay", self.weight_decay, low=0, high=10)
        if self.loss_on == "assistant" and self.packing == "wrapped":
            raise InvalidWorkload(
                "workload.loss_on is 'assistant' and workload.packing 'wrapped', which learns every token of its rows",
                field="workload.packing",
                value="wrapped",
                allowed=["best_fit", "off"],
                hint="Keep samples whole: workload.packing best_fit or off.",
            )
        require_float("beta", self.beta, low=0, high=100, low_allowed=False)
        self._check_objective()
        if self.optimizer not in OPTIMIZER_NAMES:
            raise InvalidWorkload(
                f"workload.optimizer is {reprlib.repr(self.optimizer)}; allowed: {', '.join(OPTIMIZER_NAMES)}",
                field="workload.optimizer",
                value=shown_value(self.optimizer),
                allowed=list(OPTIMIZER_NAMES),
            )
        require_float("momentum", self.momentum, low=0, high=0.99999)
        require_float("beta1", self.beta1, low=0, high=0.99999)
        require_float("beta2", self.beta2, low=0, high=0.9999999)
        require_float("epsilon", self.epsilon, low=0, high=1, low_allowed=False)
        if self.max_grad_norm is not None:
            require_float("max_grad_norm", self.max_grad_norm, low=0, high=1e9, low_allowed=False)

    def _check_objective(self) -> None:
        """Raise InvalidWorkload for what an objective that reads pairs cannot be combined with."""
        if not self.has_pairs:
            return
        if self.packing != "off":
            raise InvalidWorkload(
                f"workload.objective is {self.objective!r} and workload.packing {self.packing!r}; the two answers of a pair have "
                "a row each",
                field="workload.packing",
                value=self.packing,
                allowed=["off"],
                hint="Set workload.packing to off.",
            )
        if self.loss_on != "assistant":
            raise InvalidWorkload(
                f"workload.objective is {self.objective!r} and workload.loss_on {self.loss_on!r}; answers alone are compared",
                field="workload.loss_on",
                value=self.loss_on,
                allowed=["assistant"],
                hint="Set workload.loss_on to assistant.",
            )
        if self.objective == "dpo" and self.adapter is None:
            raise InvalidWorkload(
                "workload.objective is 'dpo' without adapters; its reference is the model with its adapters switched off, and no "
                "second copy of the weights is kept",
                field="workload.adapter",
                value=None,
                allowed="an adapter (LoRA, QLoRA)",
                hint="Train adapters (recipe preference), or set workload.objective to orpo, which needs no reference.",
            )

    @property
    def has_pairs(self) -> bool:
        """True if it learns from pairs of a better and a worse answer."""
        return self.objective != "next_token"

    @property
    def rows_per_sequence(self) -> int:
        """Rows of a micro-batch for each of its sequences: two where these are pairs."""
        return 2 if self.has_pairs else 1

    @property
    def num_moments(self) -> int:
        """Numbers that the optimizer keeps for each weight between steps, beside its fp32 value."""
        if self.optimizer == "adamw":
            return 2
        if self.optimizer == "sgd":
            return 1 if self.momentum > 0 else 0
        return 1 if self.optimizer == "lion" else 0

    @property
    def kept_state(self) -> KeptState:
        """The state that its optimizer keeps of each trained tensor."""
        return KeptState(optimizer=self.optimizer, num_moments=self.num_moments)

    @property
    def is_packed(self) -> bool:
        """True if rows hold samples that do not attend to each other."""
        return self.packing == "best_fit"

    def of_rank(self, num_ranks: int) -> "TrainingWorkload":
        """The part of each step that one of so many ranks does. Raises InvalidWorkload where sequences cannot be dealt out."""
        if self.global_batch_size % num_ranks:
            raise InvalidWorkload(
                f"workload.global_batch_size is {self.global_batch_size}, which {num_ranks} devices cannot share evenly",
                field="workload.global_batch_size",
                value=self.global_batch_size,
                allowed=f"a multiple of {num_ranks}",
                hint=f"Take a multiple of {num_ranks}, or fewer devices.",
            )
        return self if num_ranks == 1 else replace(self, global_batch_size=self.global_batch_size // num_ranks)

    @property
    def tokens_per_step(self) -> int:
        """Places of all rows, padding among them."""
        return self.global_batch_size * self.rows_per_sequence * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class GenerationWorkload:
    """Batch generation: each prompt is continued by as many tokens as asked for."""

    prompt_length: int = 512
    """Tokens in each prompt, 2 to 131,072; in the longest one if ``prompt_lengths`` lists them all."""
    num_new_tokens: int = 128
    """Tokens generated after each prompt, 1 to 131,072; no token ends a sequence early. The largest count if
    ``new_token_counts`` lists them all."""
    num_sequences: int = 1
    """Total number of prompts, however they are split into passes."""
    seed: int = 0
    """Fixes random weights and made-up prompts."""
    prompt_lengths: tuple[int, ...] = ()
    """Tokens in each prompt, if they differ; empty if all have ``prompt_length``. See ``of_prompts``."""
    new_token_counts: tuple[int, ...] = ()
    """Tokens generated after each prompt, in the order of ``prompt_lengths``, if they differ; empty if all are
    ``num_new_tokens``."""
    draws: bool = False
    """True if any sequence draws its tokens (a temperature above 0) instead of taking the likeliest. Sampling needs extra
    memory, and time per sequence."""

    @property
    def is_even(self) -> bool:
        """True if all prompts have one length and ask for the same number of tokens."""
        return not self.prompt_lengths and not self.new_token_counts

    def __post_init__(self) -> None:
        require_int("prompt_length", self.prompt_length, low=2, high=131_072)
        require_int("num_new_tokens", self.num_new_tokens, low=1, high=131_072)
        require_int("num_sequences", self.num_sequences, low=1, high=1_000_000_000)
        require_int("seed", self.seed, low=0, high=2**63 - 1)
        for length in set(self.prompt_lengths):
            require_int("prompt_lengths", length, low=2, high=131_072)
        for count in set(self.new_token_counts):
            require_int("new_token_counts", count, low=1, high=131_072)
        self._check_each("prompt_lengths", "lengths", longest="prompt_length")
        self._check_each("new_token_counts", "counts", longest="num_new_tokens")

    def _check_each(self, name: str, what: str, *, longest: str) -> None:
        """Raise InvalidWorkload if a list with one entry per sequence contradicts the number of sequences or the longest."""
        given: tuple[int, ...] = getattr(self, name)
        known = (len(given), max(given, default=0))
        if given and known != (self.num_sequences, getattr(self, longest)):
            raise InvalidWorkload(
                f"workload.{name} has {known[0]:,} {what} up to {known[1]:,}; workload.num_sequences is "
                f"{self.num_sequences:,} and workload.{longest} {getattr(self, longest):,}: give their number and the longest",
                field=f"workload.{name}",
                value=known[0],
                allowed={"num_sequences": known[0], longest: known[1]},
            )

    @classmethod
    def of_prompts(
        cls,
        prompt_lengths: Sequence[int],
        *,
        num_new_tokens: int | Sequence[int] = 128,
        seed: int = 0,
        draws: bool = False,
    ) -> "GenerationWorkload":
        """Make a workload of prompts of these lengths, at least one. num_new_tokens: for each prompt, or one number for all."""
        counts = (num_new_tokens,) if isinstance(num_new_tokens, int) else tuple(num_new_tokens)
        return cls(
            prompt_length=max(prompt_lengths),
            num_new_tokens=max(counts),
            num_sequences=len(prompt_lengths),
            seed=seed,
            prompt_lengths=tuple(prompt_lengths) if len(set(prompt_lengths)) > 1 else (),
            new_token_counts=counts if len(set(counts)) > 1 else (),
            draws=draws,
        )

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Prompt tokens and new tokens of each sequence; a single pair if all sequences are alike."""
        if not self.prompt_lengths and not self.new_token_counts:
            return ((self.prompt_length, self.num_new_tokens),)
        prompts = self.prompt_lengths or (self.prompt_length,) * self.num_sequences
        counts = self.new_token_counts or (self.num_new_tokens,) * self.num_sequences
        return tuple(zip(prompts, counts, strict=True))

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Prompt tokens and new tokens of the sequence that needs the most positions."""
        return max(self.lengths, key=sum) if self.new_token_counts else (self.prompt_length, self.num_new_tokens)

    @property
    def total_new_tokens(self) -> int:
        """New tokens of all sequences together."""
        return sum(self.new_token_counts) or self.num_sequences * self.num_new_tokens

    def as_if_equal(self, *, max_sequence_length: int) -> "GenerationWorkload":
        """Return the workload in which every prompt is the longest and asks for the most new tokens, as far as a model has
        positions. No plan needs less for it than for this one.
        """
        if not self.prompt_lengths and not self.new_token_counts:
            return self
        most_new = max(1, min(self.num_new_tokens, max_sequence_length - self.prompt_length))
        return replace(self, prompt_lengths=(), new_token_counts=(), num_new_tokens=most_new)

    def of_replica(self, replica: int, *, num_replicas: int) -> "GenerationWorkload":
        """The share of one of several copies of the model (``deal_sequences``)."""
        if num_replicas == 1:
            return self
        if self.is_even:
            return replace(self, num_sequences=len(range(replica, self.num_sequences, num_replicas)))
        mine = [self.lengths[index] for index in deal_sequences(self.lengths, num_replicas=num_replicas)[replica]]
        return GenerationWorkload.of_prompts(
            [prompt for prompt, _ in mine],
            num_new_tokens=[num_new for _, num_new in mine],
            seed=self.seed,
            draws=self.draws,
        )

    @property
    def cache_length(self) -> int:
        """Largest number of tokens whose keys and values are kept: all but the last one, which nothing follows."""
        return self.prompt_length + self.num_new_tokens - 1


def deal_sequences(lengths: Sequence[tuple[int, int]], *, num_replicas: int) -> list[list[int]]:
    """Indices of sequences by replica: dealt out one by one, the longest first, so that the first replica has no fewer tokens to
    run through than any other. lengths: prompt tokens and new tokens of each.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-sum(lengths[index]), index))
    return [order[replica::num_replicas] for replica in range(num_replicas)]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Sampling settings that a generate job applies to each of its prompts; a line of the file may override them."""

    max_new_tokens: int = 128
    """Most tokens generated after a prompt, 1 to 131,072."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; otherwise logits are divided by it, up to 2."""
    top_k: int = 0
    """Tokens are drawn from this many of the likeliest; 0 for all."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest that together have this probability, above 0 to 1."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation, at most 4; they are left out of it."""
    seed: int = 0
    """Seed of the first prompt. Each later prompt has the next seed, so equal prompts are drawn differently and a run can be
    repeated."""

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, low=1, high=131_072)
        require_float("temperature", self.temperature, low=0, high=2)
        require_int("top_k", self.top_k, low=0, high=1_000_000)
        require_float("top_p", self.top_p, low=0, high=1, low_allowed=False)
        require_int("seed", self.seed, low=0, high=2**63 - 1)
        if len(self.stop) > MAX_STOPS or any(not 1 <= len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidWorkload(
                f"workload.stop is {reprlib.repr(self.stop)}; "
                f"allowed: at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters",
                field="workload.stop",
                value=shown_value(list(self.stop)),
                allowed=f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters",
            )
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 200
