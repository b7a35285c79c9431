"""A preview shows what training would learn, without training."""

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.data.bundled import CHATS_FILE
from optimizer.data.preview import main
from optimizer.data.samples.rows import SampleRows
from optimizer.data.tokens import tokenize_dataset


def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> tuple[int, Any]:
    monkeypatch.setattr("optimizer.data.preview.limit_process", lambda **_: None)  # it would limit the tests
    code = main([str(path), "--format", "jsonl", *options])
    return code, json.loads(capsys.readouterr().out)


def test_the_first_samples_are_cut_into_what_is_learnt_and_what_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, answer = _run(capsys, monkeypatch, CHATS_FILE)
    preview = answer["preview"]
    assert (code, preview["num_samples"], preview["is_whole"], preview["template"]) == (0, 1200, True, "default")
    first = json.loads(CHATS_FILE.read_text().splitlines()[0])["messages"]
    question, answered = preview["samples"][0]["parts"]
    assert question == [f"user: {first[0]['content']}\nassistant:", False]
    assert answered == [f" {first[1]['content']}\n", True]


def test_its_counts_are_those_of_the_rows_that_a_job_makes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, answer = _run(capsys, monkeypatch, CHATS_FILE, "--sequence-length", "64")
    tokens = tokenize_dataset(
        file=CHATS_FILE, format="jsonl", tokenizer_file=None, folder=tmp_path, loss_on="assistant"
    )
    facts = SampleRows(tokens, sequence_length=64, seed=0, packs=True, validation_fraction=0.5).facts()
    preview = answer["preview"]
    assert (preview["num_cut"], preview["num_left_out"]) == (facts.num_cut, facts.num_left_out)
    assert facts.num_rows < preview["packed_rows"] < 2.2 * facts.num_rows


def test_a_sample_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    code, answer = _run(capsys, monkeypatch, tmp_path / "d.jsonl")
    assert code == 2
    assert "line 1: only messages by user" in answer["error"]["message"]


def test_both_answers_of_a_pair_are_shown_as_learnt_and_what_comes_before_them_as_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "Well?", "chosen": "Yes.", "rejected": "No."}) + "\n")
    _, answer = _run(capsys, monkeypatch, file)
    shown = [sample["parts"] for sample in answer["preview"]["samples"]]
    question = ["user: Well?\nassistant:", False]
    assert shown == [[question, [" Yes.\n", True]], [question, [" No.\n", True]]]
