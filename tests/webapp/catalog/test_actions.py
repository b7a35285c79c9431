"""Uploads: what is kept, what is refused, and that a refusal leaves nothing behind."""

import json
import re
import struct
from pathlib import Path
from typing import Any, Never

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile

from optimizer.base.errors import InvalidDataset, InvalidInput, InvalidModel, UnsupportedModelType
from optimizer.data.bundled import TOKENIZER_FILE
from tests.webapp.conftest import TINY_CONFIG, make_text, make_tiny_model
from webapp.catalog.actions import create_dataset, create_model, heartbeat_machine, register_machine
from webapp.catalog.files.limited import run_limited
from webapp.catalog.files.model_parts import as_sidecars
from webapp.catalog.models import Dataset, Machine, Model
from webapp.catalog.queries import datasets_visible_to, models_visible_to


def upload(name: str, content: bytes | dict[str, Any]) -> SimpleUploadedFile:
    return SimpleUploadedFile(name, content if isinstance(content, bytes) else json.dumps(content).encode())


def safetensors(tensors: dict[str, Any]) -> bytes:
    """A file as the format says: header length, header, data."""
    header, data = {}, b""
    for name, shape in tensors.items():
        num_bytes = 4
        for size in shape:
            num_bytes *= size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + num_bytes]}
        data += bytes(num_bytes)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def leftovers(home: Path) -> list[Any]:
    return [path for kind in ("spool", "models", "datasets") for path in (home / kind).glob("*")]


def test_a_config_alone_makes_a_model_with_a_config_written_afresh(ada: User, headroom_home: Path) -> None:
    model = create_model(
        owner=ada, name="mine", config=upload("config.json", {**TINY_CONFIG, "auto_map": {"x": "y"}, "_attn_x": 1})
    )
    told = "the config brings code of its own, which is not run; this is an estimate of transformers' GPT2LMHeadModel"
    assert list(model.unread) == [told]
    kept = json.loads((headroom_home / model.folder / "config.json").read_text())
    assert (model.model_type, model.has_weights, model.has_tokenizer, model.owner) == ("gpt2", False, False, ada)
    assert not {"auto_map", "_attn_x"} & set(kept)
    assert model.num_parameters > 0
    assert list((headroom_home / "spool").iterdir()) == []


def test_weights_are_checked_and_kept_under_the_standard_name(ada: User, headroom_home: Path) -> None:
    weights = upload("anything.safetensors", safetensors({"wte.weight": [4, 2]}))
    model = create_model(owner=ada, name="mine", config=upload("config.json", TINY_CONFIG), weights=[weights])
    assert model.has_weights
    assert (headroom_home / model.folder / "model.safetensors").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "model.bin",
            b"\x80\x04",
            "weights file is named 'model.bin'; allowed: *.safetensors and model.safetensors.index.json",
        ),
        ("../../evil.safetensors.pt", b"", "weights file is named"),
        ("model.safetensors", b"\x80\x04\x95abc", "weights file model.safetensors"),
        ("model.safetensors", b"", "weights file model.safetensors"),
        ("model.safetensors", struct.pack("<Q", 2**62) + b"{}", "weights file model.safetensors: a header of"),
        ("model.safetensors", safetensors({"../../etc/x": [1]}), "a tensor named"),
        ("model.safetensors", safetensors({"w": [2]})[:-1], "weights file model.safetensors"),
    ],
)
def test_bad_weights_are_refused_by_name_and_leave_nothing(
    ada: User, headroom_home: Path, name: str, content: bytes, text: str
) -> None:
    with pytest.raises(InvalidModel) as refusal:
        create_model(owner=ada, name="mine", config=upload("config.json", TINY_CONFIG), weights=[upload(name, content)])
    assert text in str(refusal.value)
    assert leftovers(headroom_home) == []
    assert not Model.objects.exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "config.json is not JSON"),
        (b"[" * 100_000, "config.json is not JSON"),
        (b'{"model_type": "gpt2", "n_embd": 32, "n_embd": 64}', "config.json is not JSON: the name 'n_embd' occurs twice"),
        (b" " * (1024 * 1024 + 1), "config.json has 1,048,577 bytes; allowed: at most 1,048,576"),
        (b"{}", "model_type is missing"),
        (json.dumps({**TINY_CONFIG, "n_head": 3}).encode(), "n_embd is 32; allowed: a multiple of n_head (3)"),
    ],
)
def test_a_bad_config_is_refused_with_what_is_allowed(
    ada: User, headroom_home: Path, content: bytes, text: str
) -> None:
    with pytest.raises(InvalidModel) as refusal:
        create_model(owner=ada, name="mine", config=upload("config.json", content))
    assert text in str(refusal.value)
    assert leftovers(headroom_home) == []


def test_two_weights_files_of_one_name_are_refused_in_words(ada: User, headroom_home: Path) -> None:
    weights = [upload("a.safetensors", safetensors({"wte.weight": [4, 2]})) for _ in range(2)]
    with pytest.raises(InvalidModel, match=re.escape("two weights files are named a.safetensors; allowed: each name once")):
        create_model(owner=ada, name="mine", config=upload("config.json", TINY_CONFIG), weights=weights)
    assert leftovers(headroom_home) == []


def test_two_files_of_one_name_beside_the_weights_are_refused_in_words() -> None:
    with pytest.raises(InvalidModel, match=re.escape("generation_config.json: two files of this name; allowed: each name once")):
        as_sidecars([upload("generation_config.json", {}), upload("generation_config.json", {"top_k": 1})])


def test_an_unknown_model_type_is_named_with_those_that_work(ada: User) -> None:
    with pytest.raises(UnsupportedModelType, match="model_type 'mamba' is not supported; supported: .*gpt2.*llama"):
        create_model(owner=ada, name="mine", config=upload("config.json", {"model_type": "mamba"}))


def test_a_tokenizer_that_fits_is_kept(ada: User, headroom_home: Path) -> None:
    config = {**TINY_CONFIG, "vocab_size": 8192}
    tokenizer = upload("tokenizer.json", TOKENIZER_FILE.read_bytes())
    model = create_model(owner=ada, name="mine", config=upload("config.json", config), tokenizer=tokenizer)
    assert (headroom_home / model.folder / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{}", "tokenizer.json cannot be used"),
        (TOKENIZER_FILE.read_bytes(), "the model's vocab_size is 300"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(ada: User, headroom_home: Path, content: bytes, text: str) -> None:
    with pytest.raises(InvalidModel) as refusal:
        create_model(
            owner=ada,
            name="mine",
            config=upload("config.json", TINY_CONFIG),
            tokenizer=upload("tokenizer.json", content),
        )
    assert text in str(refusal.value)
    assert leftovers(headroom_home) == []


def test_a_text_is_kept_with_its_facts(ada: User, headroom_home: Path) -> None:
    dataset = create_dataset(owner=ada, name="words", file=upload("words.txt", b"In the beginning.\n"))
    assert (dataset.format, dataset.num_bytes, dataset.num_documents) == ("txt", 18, 1)
    assert dataset.preview.startswith("In the beginning.")
    assert (headroom_home / dataset.file).read_bytes() == b"In the beginning.\n"


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("words.doc", b"a,b", "file is named 'words.doc'; allowed: .txt, .jsonl, .json, .csv, .parquet"),
        ("words.txt", b"\xff\xfe\x00", "UTF-8"),
        ("words.txt", b"", "no text"),
        ("words.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2"),
        ("words.jsonl", b'{"text": "a"}\nnot json\n', "line 2"),
        ("words.parquet", b"PAR1 but not really PAR1", "parquet"),
    ],
)
def test_a_bad_dataset_is_refused_and_leaves_nothing(
    ada: User, headroom_home: Path, name: str, content: bytes, text: str
) -> None:
    with pytest.raises(InvalidDataset) as refusal:
        create_dataset(owner=ada, name="words", file=upload(name, content))
    assert text.lower() in str(refusal.value).lower()
    assert leftovers(headroom_home) == []
    assert not Dataset.objects.exists()


@pytest.mark.parametrize("name", ["", "   ", "x" * 201, "a\x00b"])
def test_a_name_must_be_printable_and_short(ada: User, name: str) -> None:
    with pytest.raises(InvalidInput, match="1 to 200 printable characters"):
        create_dataset(owner=ada, name=name, file=upload("words.txt", b"a"))


def test_a_row_that_cannot_be_written_takes_its_folder_with_it(
    ada: User, headroom_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Never:
        raise RuntimeError("no database")

    monkeypatch.setattr(Dataset, "save", refuse)
    with pytest.raises(RuntimeError, match="no database"):
        create_dataset(owner=ada, name="words", file=upload("words.txt", b"a word\n"))
    assert leftovers(headroom_home) == []


def test_a_check_that_takes_too_long_is_killed_and_refused(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    with pytest.raises(InvalidModel, match="weights is refused: checking it took longer than 1 s"):
        run_limited(
            "timeit",
            ["-n", "1", "-r", "1", "import time; time.sleep(60)"],
            field="weights",
            error=InvalidModel,
            owner_id=None,
            timeout_s=1,
        )


def test_a_check_that_crashes_is_refused() -> None:
    with pytest.raises(InvalidModel, match="limits of memory and time, or it is damaged and reading it crashed"):
        run_limited(
            "timeit", ["-n", "1", "-r", "1", "import os; os.abort()"], field="weights", error=InvalidModel, owner_id=None
        )


def test_a_check_that_takes_too_much_memory_is_refused() -> None:
    with pytest.raises(InvalidModel, match="could not be checked within the limits of memory and time"):
        run_limited(
            "timeit",
            ["-n", "1", "-r", "1", "x = bytearray(2 * 1024**3)"],
            field="weights",
            error=InvalidModel,
            owner_id=None,
            memory_bytes=1024**3,
        )


def test_people_see_what_is_theirs_and_what_is_everyones(ada: User, eve: User, admin: User) -> None:
    make_tiny_model(), make_tiny_model(ada), make_text(ada)
    assert [models_visible_to(person).count() for person in (ada, eve, admin)] == [2, 1, 2]
    assert [datasets_visible_to(person).count() for person in (ada, eve, admin)] == [1, 0, 1]


def test_a_machine_that_registers_again_keeps_its_calibration(machine: Machine) -> None:
    Machine.objects.update(calibration={"num_runs": 3})
    again = register_machine(name=machine.name, document=machine.document)
    assert (again.pk, again.calibration) == (machine.pk, {"num_runs": 3})
    assert heartbeat_machine(again, draining=True)
    assert Machine.objects.get().draining
