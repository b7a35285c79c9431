"""Files that make weights a chat model are listed by their names alone."""

from pathlib import Path

import pytest

from optimizer.models.files.sidecars import is_sidecar, sidecar_files


def test_what_is_there_is_listed_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    names = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.json", "generation_config.json"]
    for name in [*names, "config.json", "model.safetensors", "README.md", "additional_chat_templates/x.py"]:
        (tmp_path / name).write_text("x")
    assert sidecar_files(tmp_path) == [
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "config.json",
        "../tokenizer.json",
        "x/tokenizer.json",
        "/tokenizer.json",
        "tokenizer.json\n",
        "additional_chat_templates/../x.jinja",
        "additional_chat_templates/.jinja",
        "additional_chat_templates/a b.jinja",
        "additional_chat_templates/a/b.jinja",
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert not is_sidecar(name)
