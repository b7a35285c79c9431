"""Keeps how a model writes conversations, from the files beside its tokenizer. Reads them; no template is compiled here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidModel


@dataclass(frozen=True, kw_only=True)
class ChatFacts:
    """Facts on conversations from a model's folder, kept beside its tokenizer."""

    template: str | None = None
    """Jinja; None for plain lines ``role: content``."""
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Further templates by their names, such as ``tool_use``."""
    begin_of_text: str = ""
    end_of_text: str = ""

    @classmethod
    def read(cls, file: str | Path | None) -> "ChatFacts":
        """From ``chat.json``; without a file the default."""
        return cls() if file is None else cls(**json.loads(Path(file).read_bytes()))


def read_chat_folder(folder: str | Path) -> ChatFacts | None:
    """Facts from a model's folder; None where no file of it says anything on conversations. Raises InvalidModel.

    As in transformers chat_template.jinja comes before the templates of tokenizer_config.json, and that before
    special_tokens_map.json.
    """
    root = Path(folder)
    config = _read_json(root / "tokenizer_config.json")
    special = _read_json(root / "special_tokens_map.json")
    named = {path.stem: _read_text(path) for path in sorted((root / "additional_chat_templates").glob("*.jinja"))}
    default = _read_text(root / "chat_template.jinja") if (root / "chat_template.jinja").is_file() else None
    if config is None and special is None and default is None and not named:
        return None
    facts = read_chat_facts({} if config is None else config)
    tokens = special if isinstance(special, dict) else {}
    return ChatFacts(
        template=default if default is not None else facts.template,
        named_templates=named or (facts.named_templates if default is None else {}),
        begin_of_text=facts.begin_of_text or _token_text(tokens.get("bos_token")),
        end_of_text=facts.end_of_text or _token_text(tokens.get("eos_token")),
    )


def read_chat_facts(tokenizer_config: Any) -> ChatFacts:
    """Read a parsed tokenizer_config.json. The template is not compiled here. Raises InvalidModel."""
    if not isinstance(tokenizer_config, dict):
        raise InvalidModel("tokenizer_config.json is not an object", field="tokenizer_config", allowed="a JSON object")
    template = tokenizer_config.get("chat_template")
    named: dict[str, Any] = {}
    if isinstance(template, list):  # several by name, as transformers 4 wrote them
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.pop("default", None)
    if any(text is not None and not isinstance(text, str) for text in (template, *named.values())):
        raise InvalidModel("tokenizer_config.json: chat_template is not a text", field="tokenizer_config", allowed="a Jinja text")
    return ChatFacts(
        template=template,
        named_templates={name: text for name, text in named.items() if text is not None},
        begin_of_text=_token_text(tokenizer_config.get("bos_token")),
        end_of_text=_token_text(tokenizer_config.get("eos_token")),
    )


def _read_json(path: Path) -> Any:
    """None where there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path.name} is not JSON: {error}", field=path.stem, allowed=f"a Hugging Face {path.name}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{path.name} is not a text in UTF-8", field="chat_template", allowed="a Jinja text") from error


def _token_text(token: Any) -> str:
    """Written as a text, or as an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text[:200] if isinstance(text, str) else ""
