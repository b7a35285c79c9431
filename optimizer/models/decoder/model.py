"""The decoder as a module, with the names that this program expects of a model: ``get_decoder``, ``get_output_embeddings``,
``config``, and ``last_hidden_state`` and ``logits`` in what forward returns. It makes no cache of keys and values, and uses
one that it is given where all its blocks have full or local attention.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.models.decoder.blocks import Block, KvCache, Rotary, make_norm, make_rotary
from optimizer.models.decoder.config import owner_of_each_block


class DecoderConfig:
    """The validated config's keys as attributes."""

    is_encoder_decoder = False
    use_cache = False

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(name)
        return values[name]

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._values)


@dataclass(frozen=True, kw_only=True)
class BackboneOutput:
    last_hidden_state: torch.Tensor
    """[batch, length, hidden_size], after the final norm."""


@dataclass(frozen=True, kw_only=True)
class DecoderOutput:
    logits: torch.Tensor
    """[batch, length, vocab_size]."""
    loss: torch.Tensor | None = None
    """Mean cross-entropy against the following tokens, where labels were given."""


class Backbone(nn.Module):
    """From token ids to the last hidden state."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, sparse=config.sparse_embedding_gradients, dtype=dtype
        )
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, kind, dtype=dtype) for kind in config.layer_types)
        self.norm = make_norm(config, dtype=dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        past_key_values: KvCache | None = None,
        use_cache: bool = False,
    ) -> BackboneOutput:
        """attention_mask: [batch, length] of ones and zeros; zeros only at the end, which causal attention needs no mask for.

        past_key_values: of the tokens before these; the first time these are the whole prompt, then one token at a time.
        Raises ValueError for longer sequences than there are positions, padding at the start, and where a cache is asked for
        and none is given.
        """
        config, length = self.config, input_ids.shape[1]
        if use_cache and past_key_values is None:
            raise ValueError("this decoder makes no cache of keys and values; give it one, or call it with use_cache=False")
        first = 0 if past_key_values is None else past_key_values.get_seq_length()
        if first + length > config.max_position_embeddings:
            raise ValueError(f"{first + length} tokens; the model has positions for {config.max_position_embeddings}")
        if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            raise ValueError("attention_mask hides tokens before others; sequences must be padded at their end")
        hidden = self.embed_tokens(input_ids)
        if config.positions == "learned":
            hidden = hidden + self.embed_positions(torch.arange(first, first + length, device=input_ids.device))
        if config.dropout:
            hidden = F.dropout(hidden, config.dropout, self.training)
        rotary = self._make_rotary(first, length, hidden) if config.positions == "rope" else None
        # A second name for the blocks' input keeps it to the end of the forward pass, as the models of transformers do and as
        # a profile takes it to be; it would go earlier only where the first block is offloaded.
        embedded = hidden
        for index, block in enumerate(self.layers):
            hidden = block(hidden, rotary=rotary, cache=past_key_values, index=index)
        del embedded
        return BackboneOutput(last_hidden_state=self.norm(hidden))

    def _make_rotary(self, first: int, length: int, hidden: torch.Tensor) -> Rotary:
        return make_rotary(
            length,
            first=first,
            head_dim=self.config.head_dim,
            theta=self.config.rope_theta,
            dtype=hidden.dtype,
            device=hidden.device,
        )


class Decoder(nn.Module):
    """Backbone and output projection, with random weights."""

    base_model_prefix = "model"

    def __init__(self, values: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = DecoderConfig(values)
        self.model = Backbone(self.config, dtype=dtype)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False, dtype=dtype)
        _initialize(self)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        _share_parameters(list(self.model.layers), owner_of_each_block(values))

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool = False,
        **_: Any,
    ) -> DecoderOutput:
        """labels: the token ids themselves, -100 where one does not count; they are shifted here."""
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=use_cache).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return DecoderOutput(logits=logits, loss=loss)

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens


def _initialize(model: Decoder) -> None:
    """Normal with ``initializer_range``; where asked, what is added to the residual stream is drawn smaller by
    sqrt(2 * blocks), as GPT-2 does. Biases are zero.
    """
    config = model.config
    smaller = 1 / math.sqrt(2 * config.num_hidden_layers) if config.scale_residual_init else 1.0
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue
            is_added = name.endswith(("o_proj", "down_proj"))
            module.weight.normal_(0.0, config.initializer_range * (smaller if is_added else 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()


def _share_parameters(blocks: list[nn.Module], owners: Iterable[int]) -> None:
    """Blocks of a group stay modules of their own, whose parameters are the same objects."""
    for block, owner in zip(blocks, owners, strict=True):
        theirs = dict(blocks[owner].named_modules())
        for path, module in block.named_modules():
            for name in list(module._parameters):
                module._parameters[name] = theirs[path]._parameters[name]
