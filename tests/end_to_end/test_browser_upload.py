"""A model's folder is sent by the page in pieces: the bar moves, a cut is gone on from, and what is refused is said."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Request, Route, expect

from tests.end_to_end.site.browser import Watched

pytestmark = pytest.mark.browser

CONFIG = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
MADE = re.compile(r".*/models/model_\w+/$")
WEIGHTS_BYTES = 20 * 1024 * 1024


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "notes.txt").write_text("not a part of it")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    header = json.dumps({"wte": {"dtype": "U8", "shape": [WEIGHTS_BYTES], "data_offsets": [0, WEIGHTS_BYTES]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(WEIGHTS_BYTES))
    return folder


def test_a_folder_is_sent_and_goes_on_after_a_cut(open_tab: Callable[..., Watched], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small-chat")
    tab = open_tab("/models/")
    offsets: list[str] = []

    def cut_once(route: Route) -> None:
        if route.request.method == "PUT":
            offsets.append(route.request.url.rpartition("offset=")[2])
            if len(offsets) == 5:
                route.abort()
                return
        route.continue_()

    tab.page.route("**/api/v1/uploads/**", cut_once)
    tab.page.locator("#folder_files").set_input_files(folder)
    expect(tab.page).to_have_url(MADE)
    expect(tab.page.get_by_role("heading", level=1)).to_contain_text("small-chat")
    assert offsets.count("8388608") == 2  # the piece that was cut went again, the one before it did not
    assert offsets.count("0") == 4
    assert tab.page.evaluate("window.violations") == []


def test_an_upload_left_alone_is_gone_on_with_by_another_page(open_tab: Callable[..., Watched], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "left-alone")
    first = open_tab("/models/")
    first.page.route("**/files/3?offset=8388608", lambda route: None)
    first.page.locator("#folder_files").set_input_files(folder)
    expect(first.page.locator("#folder-upload [role=status]")).to_contain_text("8.0 MiB of 20.0 MiB sent")
    second = open_tab("/models/")
    offsets: list[str] = []

    def note(request: Request) -> None:
        if request.method == "PUT":
            offsets.append(request.url.rpartition("offset=")[2])

    second.page.on("request", note)
    second.page.locator("#folder_files").set_input_files(folder)
    expect(second.page).to_have_url(MADE)
    assert offsets == ["8388608", "16777216"]
    second.check()


def test_what_is_refused_is_said(open_tab: Callable[..., Watched], tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "notes.txt").write_text("x")
    tab = open_tab("/models/")
    tab.page.locator("#folder_files").set_input_files(folder)
    expect(tab.page.locator("#folder-upload [role=status]")).to_have_text(
        "Not added: The folder holds no config.json and no weights."
    )
    tab.check()
