"""Chat templates are read from wherever a model's folder keeps them, in transformers' order."""

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.data.chat_facts import ChatFacts, read_chat_facts, read_chat_folder


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_template_of_its_own_comes_before_that_of_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "old", "eos_token": {"content": "<e>"}})
    assert read_chat_folder(tmp_path) == ChatFacts(template="old", end_of_text="<e>")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_chat_folder(tmp_path) == ChatFacts(template="new", end_of_text="<e>")


def test_further_templates_are_kept_by_name(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert read_chat_facts({"chat_template": listed}) == ChatFacts(template="d", named_templates={"tool_use": "t"})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert read_chat_folder(tmp_path) == ChatFacts(named_templates={"rag": "r"})


def test_special_tokens_stand_in_for_what_the_tokenizer_s_config_leaves_out(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"bos_token": "<b>"}, special_tokens_map={"bos_token": "<x>", "eos_token": "<e>"})
    assert read_chat_folder(tmp_path) == ChatFacts(begin_of_text="<b>", end_of_text="<e>")


def test_a_folder_without_any_of_them_says_nothing(tmp_path: Path) -> None:
    assert read_chat_folder(tmp_path) is None


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    kept = {"template": "t", "named_templates": {"tool_use": "u"}, "begin_of_text": "", "end_of_text": "<e>"}
    write(tmp_path, chat=kept)
    assert ChatFacts.read(tmp_path / "chat.json") == ChatFacts(template="t", named_templates={"tool_use": "u"}, end_of_text="<e>")
    write(tmp_path, chat={"template": None, "begin_of_text": "", "end_of_text": ""})  # from before there were names
    assert ChatFacts.read(tmp_path / "chat.json") == ChatFacts()


@pytest.mark.parametrize("template", [1, [{"name": "a", "template": 1}]])
def test_a_template_that_is_no_text_is_refused(template: Any) -> None:
    with pytest.raises(InvalidModel, match="chat_template is not a text"):
        read_chat_facts({"chat_template": template})
