"""The bundled chats as training samples: the bundled chat model's tokenizer and template, tiny models of its vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer.data.bundled import CHATS_FILE
from optimizer.data.chat_facts import ChatFacts, read_chat_folder
from optimizer.data.token_file import TokenFile
from optimizer.data.tokens import tokenize_dataset
from optimizer.models.bundled import CHAT_MODEL_FOLDER
from optimizer.models.spec import ModelSpec, read_model_spec

VOCAB_SIZE = 4104
Chat = dict[str, Any]

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2}
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 64},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 64},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "olmo2": {},
}
TYPES = tuple(_CHANGES)


def make_spec(model_type: str) -> ModelSpec:
    """A model of three blocks without dropout, which would be drawn otherwise by each program."""
    return read_model_spec({"model_type": model_type, **_SHAPE, **_CHANGES[model_type]})


def read_chats(num_chats: int) -> list[Chat]:
    with CHATS_FILE.open() as lines:
        return [json.loads(line) for line, _ in zip(lines, range(num_chats), strict=False)]


def tokenize_chats(chats: Sequence[Chat], folder: Path) -> TokenFile:
    """The chats by the model's own template, answers alone to be learnt."""
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return tokenize_dataset(
        file=file,
        format="jsonl",
        tokenizer_file=CHAT_MODEL_FOLDER / "tokenizer.json",
        folder=folder / "tokens",
        chat=read_facts(),
        loss_on="assistant",
        vocab_size=VOCAB_SIZE,
    )


def read_facts() -> ChatFacts:
    facts = read_chat_folder(CHAT_MODEL_FOLDER)
    if facts is None:
        raise FileNotFoundError(f"{CHAT_MODEL_FOLDER.name} has no chat template")
    return facts
