"""A model made of a folder on the server: what is linked, copied, refused, and that nobody's files are touched."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from pytest_django import Settings

from optimizer.base.errors import InvalidModel
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.models.files.linked_files import check_links
from optimizer.models.files.readers import tensor_readers
from tests.webapp.conftest import TINY_CONFIG
from webapp.catalog.documents import model_document
from webapp.catalog.files.server_paths import PathNotAllowed
from webapp.catalog.linked import PathDiffers, link_model
from webapp.catalog.models import Model
from webapp.catalog.removal import delete_row, purge_deleted
from webapp.catalog.weights import weights_folder

CONFIG = {**TINY_CONFIG, "vocab_size": 5000}


def safetensors(name: str, num_values: int = 8) -> bytes:
    header = json.dumps({name: {"dtype": "F32", "shape": [num_values], "data_offsets": [0, 4 * num_values]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * num_values)


def write_folder(folder: Path, **more: bytes) -> Path:
    """A chat model in two shards."""
    (folder / "additional_chat_templates").mkdir(parents=True)
    files: dict[str, bytes] = {
        "config.json": json.dumps(CONFIG).encode(),
        "model-1.safetensors": safetensors("a"),
        "model-2.safetensors": safetensors("b"),
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        ).encode(),
        "tokenizer.json": TOKENIZER_FILE.read_bytes(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>", "chat_template": "old"}).encode(),
        "chat_template.jinja": b"new",
        "additional_chat_templates/tool_use.jinja": b"tools",
        "generation_config.json": json.dumps(
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 3]}
        ).encode(),
        "pytorch_model.bin": b"\x80\x04",
        "README.md": b"hello",
    }
    for name, content in {**files, **more}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def root(tmp_path: Path, settings: Settings) -> Path:
    folder = tmp_path / "open"
    folder.mkdir()
    settings.HEADROOM_MODEL_ROOTS = [folder]
    return folder


@pytest.fixture
def folder(root: Path) -> Path:
    return write_folder(root / "llama")


@pytest.fixture
def link(ada: User, folder: Path) -> Callable[..., Model]:
    def make(path: Path = folder, **options: Any) -> Model:
        return link_model(owner=ada, name="mine", path=str(path), **options)

    return make


def test_weights_are_linked_and_small_files_are_copied(link: Callable[..., Model], folder: Path) -> None:
    model = link()
    place = weights_folder(model)
    assert place is not None
    assert sorted(path.name for path in place.iterdir() if path.is_symlink()) == [
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(path.name for path in place.iterdir() if not path.is_symlink()) == [
        "additional_chat_templates",
        "chat.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (model.has_weights, model.has_tokenizer, model.has_chat) == (True, True, True)
    assert model.linked_from == str(folder)
    assert model_document(model)["linked_from"] == str(folder)
    assert model_document(model)["num_bytes"] > sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert [reader.name for reader in tensor_readers(place)] == ["a", "b"]
    assert all(reader.read().numel() == 8 for reader in tensor_readers(place))


def test_templates_and_settings_are_read(link: Callable[..., Model], headroom_home: Path) -> None:
    model = link()
    chat = json.loads((headroom_home / model.folder / "chat.json").read_text())
    assert (chat["template"], chat["named_templates"], chat["end_of_text"]) == ("new", {"tool_use": "tools"}, "<|endoftext|>")
    assert model.generation == {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "end_ids": [1, 3]}


def test_a_user_s_files_keep_their_rights_and_outlive_the_model(
    link: Callable[..., Model], folder: Path, headroom_home: Path
) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = {path: (path.stat().st_mode, path.stat().st_mtime_ns) for path in folder.rglob("*")}
    model = link()
    delete_row(model)
    Model.objects.update(deleted_at=timezone.now() - timedelta(days=8))
    assert purge_deleted() == [model.pk]
    assert not (headroom_home / model.folder).exists()
    assert {path: (path.stat().st_mode, path.stat().st_mtime_ns) for path in folder.rglob("*")} == before


def test_a_hub_s_cache_of_links_is_read(link: Callable[..., Model], folder: Path, root: Path) -> None:
    snapshot = root / "hub" / "snapshots" / "abc"
    (root / "hub" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(path for path in folder.iterdir() if path.is_file()):
        path.rename(root / "hub" / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    model = link(snapshot)
    place = weights_folder(model)
    assert place is not None
    assert (place / "model-1.safetensors").resolve().parent == root / "hub" / "blobs"
    assert [reader.name for reader in tensor_readers(place)] == ["a", "b"]


def test_one_file_may_have_any_name_and_mistral_s_second_copy_is_left(
    link: Callable[..., Model], root: Path
) -> None:
    for name in ("config.json", "weights-v3.safetensors"):
        (root / name).write_bytes(safetensors("a") if name.endswith("s") else json.dumps(CONFIG).encode())
    assert [file["name"] for file in link(root).linked_files] == ["model.safetensors"]
    other = write_folder(root / "mistral", **{"consolidated.safetensors": safetensors("c")})
    assert "consolidated.safetensors" not in [file["name"] for file in link(other).linked_files]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda file: file.unlink(), "cannot be read any more (No such file or directory)"),
        (lambda file: file.write_bytes(safetensors("a", 9)), "has changed since the model was added: 102 bytes then, 106 now"),
        (lambda file: os.utime(file, (1, 1)), "has changed since the model was added: written again with the same size"),
        (lambda file: shutil.rmtree(file.parent), "cannot be read any more"),
    ],
)
def test_files_that_changed_are_found_before_a_job_reads_them(
    link: Callable[..., Model], folder: Path, change: Callable[[Path], Any], text: str
) -> None:
    model = link()
    place = weights_folder(model)
    assert place is not None
    check_links(place, model.linked_files)
    change(folder / "model-1.safetensors")
    with pytest.raises(InvalidModel) as refused:
        check_links(place, model.linked_files)
    assert f"weights file {folder / 'model-1.safetensors'} {text}" in refused.value.message
    assert refused.value.hint == "Add the model again, and start the job with that one."


def test_what_the_asker_sees_must_be_what_lies_there(link: Callable[..., Model], folder: Path) -> None:
    stat = (folder / "config.json").stat()
    assert link(seen={"config.json": [stat.st_size, stat.st_mtime_ns]}).has_weights
    state = [stat.st_size, stat.st_mtime_ns]
    for seen in ({"config.json": [stat.st_size, 1]}, {"absent": [1, 1]}, {"../llama/config.json": state}):
        with pytest.raises(PathDiffers, match="is another folder than the one that was meant"):
            link(seen=seen)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"config.json": b" " * 50_000_000}, "config.json has 50,000,000 bytes; allowed: at most 1,048,576"),
        ({"model-2.safetensors": safetensors("b")[:-1]}, "weights file model-2.safetensors: 31 bytes of data"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../../etc/x.safetensors"}}'}, "a plain"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "absent.safetensors"}}'}, "names absent.safetensors, which is"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a\\nb": "model-1.safetensors"}}'}, r"it is in None|places a"),
        ({"generation_config.json": b'{"do_sample": true, "top_p": "hot"}'}, "top_p of generation_config.json is 'hot'"),
        ({"generation_config.json": b'{"eos_token_id": -1}'}, "eos_token_id of generation_config.json is"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja is not a text in UTF-8"),
        ({"tokenizer_config.json": b"["}, "tokenizer_config.json is not JSON"),
    ],
)
def test_what_cannot_be_used_is_refused_and_leaves_nothing(
    ada: User, root: Path, headroom_home: Path, more: dict[str, bytes], text: str
) -> None:
    folder = write_folder(root / "bad", **more)
    with pytest.raises(InvalidModel, match=text):
        link_model(owner=ada, name="mine", path=str(folder))
    assert not Model.objects.exists()
    assert [path for kind in ("spool", "models") for path in (headroom_home / kind).glob("*")] == []


def test_a_shard_that_leads_out_of_the_open_folders_is_refused(
    link: Callable[..., Model], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.safetensors").write_bytes(safetensors("b"))
    (folder / "model-2.safetensors").unlink()
    (folder / "model-2.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(PathNotAllowed, match="model-2.safetensors in .* is a link that leads out of the folders that are open"):
        link()


def test_a_folder_of_ten_thousand_files_is_looked_at_once(link: Callable[..., Model], folder: Path) -> None:
    for number in range(10_000):
        (folder / f"checkpoint-{number}.txt").touch()
    assert link().has_weights


def test_a_name_with_a_line_break_is_refused(link: Callable[..., Model], root: Path) -> None:
    write_folder(root / "a\nb")
    with pytest.raises(PathNotAllowed, match="printable"):
        link(root / "a\nb")
