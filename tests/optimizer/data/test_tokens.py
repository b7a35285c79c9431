"""A dataset is tokenized once, whole or not at all, with the tokenizer that the manifest names."""

import hashlib
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from optimizer.base.errors import DiskFull, InvalidDataset, InvalidModel
from optimizer.data import documents
from optimizer.data import tokens as tokens_module
from optimizer.data.bundled import END_OF_TEXT, END_OF_TEXT_ID, TEXT_FILE, TOKENIZER_FILE
from optimizer.data.bundled.train_tokenizer import train_tokenizer
from optimizer.data.chat_facts import ChatFacts
from optimizer.data.token_file import TokenFile
from optimizer.data.tokenizer import load_tokenizer
from optimizer.data.tokens import tokenize_dataset

TEXT = "In the beginning\n\n\nwas the Word,\n\nand the Word"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def _tokenize(text_file: Path, folder: Path, **options: object) -> TokenFile:
    return tokenize_dataset(
        file=text_file,
        folder=folder,
        **{"format": "txt", "tokenizer_file": None, **options},
    )


def _write_tokenizer(path: Path, vocab: dict[str, int]) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


OWN_VOCAB = {"<unk>": 0, "</s>": 1, "In": 2, "the": 3, "Word": 4}


def test_documents_are_written_one_after_another_with_end_of_text_between(text_file: Path, tmp_path: Path) -> None:
    made = _tokenize(text_file, tmp_path / "tokens")
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    ids = made.tokens().tolist()
    expected = []
    for document in ("In the beginning", "was the Word,\n\nand the Word"):
        expected += [*tokenizer.encode(document).ids, END_OF_TEXT_ID]
    assert ids == expected
    assert (
        tokenizer.decode(ids, skip_special_tokens=False)
        == "In the beginning<|endoftext|>was the Word,\n\nand the Word<|endoftext|>"
    )


def test_the_manifest_says_what_was_made_from_what(text_file: Path, tmp_path: Path) -> None:
    made = _tokenize(text_file, tmp_path / "tokens")
    manifest = made.manifest
    assert manifest.dataset_sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert manifest.tokenizer_sha256 == hashlib.sha256(TOKENIZER_FILE.read_bytes()).hexdigest()
    assert (manifest.tokenizer, manifest.dtype, manifest.num_documents, manifest.vocab_size) == (
        "bundled",
        "uint16",
        2,
        4096,
    )
    assert manifest.tokens_sha256 == hashlib.sha256(made.tokens().tobytes()).hexdigest()
    assert made.verify()
    assert TokenFile.open(made.folder) == made


def test_a_second_call_finds_the_first_ones_file(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _tokenize(text_file, tmp_path / "tokens")
    monkeypatch.setattr(tokens_module, "read_documents", lambda *_, **__: pytest.fail("read again"))
    assert _tokenize(text_file, tmp_path / "tokens") == made


def test_another_text_tokenizer_or_template_is_another_file(text_file: Path, tmp_path: Path) -> None:
    own = _write_tokenizer(tmp_path / "tokenizer.json", OWN_VOCAB)
    other_text = tmp_path / "other.txt"
    other_text.write_text("other")
    folder = tmp_path / "tokens"
    made = [
        _tokenize(text_file, folder),
        _tokenize(text_file, folder, tokenizer_file=own),
        _tokenize(text_file, folder, chat=ChatFacts(template="{{ messages }}")),
        _tokenize(other_text, folder),
    ]
    assert len({one.folder for one in made}) == 4


def test_the_models_own_tokenizer_is_used_and_named(text_file: Path, tmp_path: Path) -> None:
    own = _write_tokenizer(tmp_path / "tokenizer.json", OWN_VOCAB)
    made = _tokenize(text_file, tmp_path / "tokens", tokenizer_file=own, vocab_size=5)
    assert made.manifest.tokenizer == "own"
    assert made.tokens().tolist() == [2, 3, 0, 1, 0, 3, 4, 0, 0, 3, 4, 1]


def test_a_large_vocabulary_takes_four_bytes_a_token(text_file: Path, tmp_path: Path) -> None:
    vocab = {**OWN_VOCAB, **{f"w{index}": index for index in range(5, 70_000)}, "beginning": 70_000}
    own = _write_tokenizer(tmp_path / "tokenizer.json", vocab)
    made = _tokenize(text_file, tmp_path / "tokens", tokenizer_file=own)
    assert made.manifest.dtype == "uint32"
    assert made.tokens()[:4].tolist() == [2, 3, 70_000, 1]


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel) as caught:
        _tokenize(text_file, tmp_path / "tokens", vocab_size=4095)
    assert str(caught.value) == (
        "the bundled tokenizer has 4,096 entries, the model's vocab_size is 4,095; allowed: vocab_size of at least 4,096"
    )
    assert not (tmp_path / "tokens").exists()


def test_the_end_token_may_be_given_and_must_be_found_otherwise(tmp_path: Path) -> None:
    own = _write_tokenizer(tmp_path / "tokenizer.json", {"<unk>": 0, "a": 1, "stop": 2})
    assert load_tokenizer(own, end_of_text_id=2).end_of_text == "stop"
    with pytest.raises(InvalidModel, match=r"no end-of-text token; allowed: one of <\|endoftext\|>"):
        load_tokenizer(own)


def test_the_bundled_tokenizer_keeps_its_end_token_whatever_the_models_config_says(tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(TOKENIZER_FILE.read_bytes())
    for file in (None, TOKENIZER_FILE, copy):
        loaded = load_tokenizer(file, end_of_text_id=2)
        assert (loaded.source, loaded.end_of_text_id) == ("bundled", END_OF_TEXT_ID)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"not json", b'{"model": {"type": "Evil"}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match="cannot be read"):
        load_tokenizer(path)


def test_truncation_and_padding_of_an_uploaded_tokenizer_are_off(text_file: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = _tokenize(text_file, tmp_path / "tokens", tokenizer_file=tmp_path / "tokenizer.json")
    assert own.tokens().tolist() == _tokenize(text_file, tmp_path / "tokens").tokens().tolist()


def test_messages_are_written_by_the_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    plain = _tokenize(path, tmp_path / "tokens", format="jsonl")
    assert tokenizer.decode(plain.tokens().tolist()) == "user: hi\n"
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    own = _tokenize(path, tmp_path / "tokens", format="jsonl", chat=ChatFacts(template=template))
    assert tokenizer.decode(own.tokens().tolist()) == "[user]hi"


def test_a_failure_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "BATCH_CHARACTERS", 100)
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good line\n\n\n" * 300 + b"\xff")
    with pytest.raises(InvalidDataset, match="line 901"):
        _tokenize(path, tmp_path / "tokens")
    assert [entry.suffix for entry in (tmp_path / "tokens").iterdir()] == [".lock"]


def test_a_full_disk_is_said_and_leaves_nothing(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens_module, "write_manifest", fail)
    with pytest.raises(DiskFull, match="no room for the tokens of the dataset"):
        _tokenize(text_file, tmp_path / "tokens")
    assert [entry.suffix for entry in (tmp_path / "tokens").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_replaced(text_file: Path, tmp_path: Path) -> None:
    made = _tokenize(text_file, tmp_path / "tokens")
    stage = made.folder.with_name(f".{made.folder.name}.stage")
    made.folder.rename(stage)
    (stage / "tokens.bin").write_bytes(b"half")
    again = _tokenize(text_file, tmp_path / "tokens")
    assert again.verify()
    assert not stage.exists()


def test_a_dataset_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n\n")
    with pytest.raises(InvalidDataset, match="the dataset holds no text"):
        _tokenize(path, tmp_path / "tokens")


def test_a_damaged_token_file_is_noticed(text_file: Path, tmp_path: Path) -> None:
    made = _tokenize(text_file, tmp_path / "tokens")
    data = bytearray((made.folder / "tokens.bin").read_bytes())
    data[0] ^= 1
    (made.folder / "tokens.bin").write_bytes(data)
    assert not made.verify()
    (made.folder / "tokens.bin").write_bytes(data[:-2])
    with pytest.raises(InvalidDataset, match="bytes were expected"):
        TokenFile.open(made.folder)


def _tokenize_in_process(text_file: Path, folder: Path, answers: "multiprocessing.Queue[str]") -> None:
    answers.put(_tokenize(text_file, folder).manifest.tokens_sha256)


def test_processes_that_start_together_make_one_file(text_file: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=_tokenize_in_process, args=(text_file, tmp_path / "t", answers)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    hashes = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    answers.close()
    assert len(hashes) == 1
    assert len([entry for entry in (tmp_path / "t").iterdir() if entry.is_dir()]) == 1


def test_pieces_of_a_long_document_get_one_end_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_PIECE_CHARACTERS", 100)
    path = tmp_path / "long.txt"
    path.write_text("\n".join(["a line of some length, many times over"] * 60))
    made = _tokenize(path, tmp_path / "tokens")
    assert made.manifest.num_documents == 1
    assert np.count_nonzero(made.tokens() == END_OF_TEXT_ID) == 1
    assert Tokenizer.from_file(str(TOKENIZER_FILE)).decode(made.tokens().tolist()) == path.read_text()


def test_the_bundled_tokenizer_is_what_the_script_makes_of_the_bundled_text() -> None:
    made = train_tokenizer(TEXT_FILE)
    assert made.to_str(pretty=True) == TOKENIZER_FILE.read_text()


def test_the_bundled_tokenizer_has_4096_entries_and_writes_any_text() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    for text in ("In the beginning", "naïve 漢字 🙂\n\ttabs", "", "<b>"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
