"""Keeps how a model writes conversations, from its tokenizer_config.json. Reads JSON; no template is compiled here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidModel


@dataclass(frozen=True, kw_only=True)
class ChatFacts:
    """Facts on conversations from a model's tokenizer_config.json, kept beside its tokenizer."""

    template: str | None = None
    """Jinja; None for plain lines ``role: content``."""
    begin_of_text: str = ""
    end_of_text: str = ""

    @classmethod
    def read(cls, file: str | Path | None) -> "ChatFacts":
        """From ``chat.json``; without a file the default."""
        return cls() if file is None else cls(**json.loads(Path(file).read_bytes()))


def read_chat_facts(tokenizer_config: Any) -> ChatFacts:
    """Read a parsed tokenizer_config.json. The template is not compiled here. Raises InvalidModel."""
    if not isinstance(tokenizer_config, dict):
        raise InvalidModel("tokenizer_config.json is not an object", field="tokenizer_config", allowed="a JSON object")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by name, as transformers 4 wrote them
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise InvalidModel("tokenizer_config.json: chat_template is not a text", field="tokenizer_config", allowed="a Jinja text")
    return ChatFacts(
        template=template,
        begin_of_text=_token_text(tokenizer_config.get("bos_token")),
        end_of_text=_token_text(tokenizer_config.get("eos_token")),
    )


def _token_text(token: Any) -> str:
    """Written as a text, or as an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text[:200] if isinstance(text, str) else ""
