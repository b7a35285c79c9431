"""``headroom estimate --lengths``: the worst batch of a dataset, from a config and a list of lengths."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from optimizer.api.estimate_padded import estimate_padded_model, read_lengths
from optimizer.base.errors import InvalidInput
from optimizer.cli.main import main
from optimizer.data.lengths import Lengths
from optimizer.workload import TrainingWorkload

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
LENGTHS = [random.Random(7).randint(8, 90) for _ in range(40)] + [120]
WORKLOAD = TrainingWorkload(sequence_length=100, global_batch_size=4, num_steps=10)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that keeps both profiles once they were traced."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_HOME", str(home))


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "lengths").write_text("\n".join(map(str, LENGTHS)))
    workload = ["--sequence-length", "100", "--batch", "4", "--steps", "10"]
    return ["estimate", "--model", str(tmp_path), "--gpu", "T4", "--lengths", str(tmp_path / "lengths"), *workload]


def test_the_worst_batch_is_the_one_with_the_longest_sequence_cut_as_asked() -> None:
    found = estimate_padded_model(LLAMA, machine="T4", lengths=Lengths(LENGTHS), workload=WORKLOAD)
    assert found.predicted.worst_batch.length == 100
    assert found.predicted.mean.step_ms <= found.predicted.worst.step_ms
    assert found.verdict == "fits"


def test_the_command_says_what_the_function_finds(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = estimate_padded_model(LLAMA, machine="T4", lengths=Lengths(LENGTHS), workload=WORKLOAD)
    assert document == json.loads(json.dumps(expected.to_json()))


def test_the_command_prints_the_worst_batch_the_mean_and_the_padding(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*asked, "--pad-to-multiple", "16", "--plan", "recompute_all"]) == 0
    told = capsys.readouterr().out
    assert "sequences of 112 tokens" in told
    assert "41, cut to 100 tokens" in told
    assert "% of all tokens" in told
    assert "fits" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lengths have the shape (0,); allowed: a list of at least one"),
        ("12\nx", "is no list of lengths: invalid literal"),
        ("12\n0", "holds what is no length"),
        ("[1.5]", "holds what is no length"),
        ("[true]", "holds what is no length"),
        ("[" * 100_000, "is no list of lengths: "),
        ("9" * 30, "holds what is no length"),
    ],
)
def test_a_file_that_holds_no_lengths_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_lengths(tmp_path / "lengths")
    assert words in caught.value.message


def test_a_json_list_of_lengths_is_read(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("[3, 4, 5]")
    assert read_lengths(tmp_path / "lengths") == Lengths([3, 4, 5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--plan", "best"], "a plan for padded batches is not searched for"),
        (["--pad-to-multiple", "0"], "pad_to_multiple is 0"),
        (["--lengths", "/nowhere"], "--lengths /nowhere: No such file"),
    ],
)
def test_what_cannot_be_answered_for_padded_batches_is_said(
    asked: list[str], changes: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*asked, *changes]) == 2
    assert words in capsys.readouterr().err
