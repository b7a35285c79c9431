"""Pairs of answers as tokens and as rows: what is learnt, what stands beside what, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.base.errors import InvalidDataset
from optimizer.data.batches import IGNORED_LABEL
from optimizer.data.chat_facts import read_chat_folder
from optimizer.data.samples.rows import PairRows, open_batches
from optimizer.data.token_file import TokenFile
from optimizer.data.tokenizer import load_tokenizer
from optimizer.data.tokens import tokenize_dataset
from optimizer.models.bundled import CHAT_MODEL_FOLDER
from optimizer.workload import TrainingWorkload

TOKENIZER = CHAT_MODEL_FOLDER / "tokenizer.json"
Tokenize = Callable[[list[dict[str, Any]]], TokenFile]


@pytest.fixture
def tokenize(tmp_path: Path) -> Tokenize:
    def make(rows: list[dict[str, Any]]) -> TokenFile:
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tokenize_dataset(
            file=file,
            format="jsonl",
            tokenizer_file=TOKENIZER,
            folder=tmp_path / "tokens",
            chat=read_chat_folder(CHAT_MODEL_FOLDER),
            loss_on="assistant",
            pairs=True,
        )

    return make


def make_pair(number: int) -> dict[str, Any]:
    answers = {"chosen": f"Yes, {'very ' * number}gladly.", "rejected": f"No, {number} times."}
    return {"prompt": f"Will you say {number}?", **answers}


def open_pairs(tokens: TokenFile, **changes: Any) -> PairRows:
    workload = TrainingWorkload(
        **{"sequence_length": 64, "packing": "off", "loss_on": "assistant", "objective": "orpo", "seed": 5, **changes}
    )
    rows = open_batches(tokens, workload)
    assert isinstance(rows, PairRows)
    return rows


def learnt_text(tokens: TokenFile, sample: int) -> str:
    start, end = tokens.starts()[sample : sample + 2]
    trained = tokens.trained()
    ids = [int(token) for token, flag in zip(tokens.tokens()[start:end], trained[start:end], strict=True) if flag]
    return load_tokenizer(TOKENIZER).tokenizer.decode(ids, skip_special_tokens=False)


def test_a_pair_becomes_two_samples_of_which_the_answers_are_learnt(tokenize: Tokenize) -> None:
    tokens = tokenize([make_pair(1)])
    assert len(tokens.starts()) == 3
    assert learnt_text(tokens, 0).startswith("Yes, very gladly.")
    assert learnt_text(tokens, 1).startswith("No, 1 times.")


def test_answers_that_both_conversations_have_are_not_learnt(tokenize: Tokenize) -> None:
    talk = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "Well?"},
    ]
    answers = {name: [*talk, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    tokens = tokenize([answers])
    assert learnt_text(tokens, 0).startswith("chosen")
    assert learnt_text(tokens, 1).startswith("rejected")


def test_an_answer_that_the_other_begins_with_is_still_learnt(tokenize: Tokenize) -> None:
    tokens = tokenize([{"prompt": "Well?", "chosen": "Yes", "rejected": "Yes, I think."}])
    assert learnt_text(tokens, 0).startswith("Yes")
    assert learnt_text(tokens, 1).startswith("Yes, I think.")


def test_better_answers_come_first_and_the_worse_ones_in_the_same_order(tokenize: Tokenize) -> None:
    tokens = tokenize([make_pair(number) for number in range(1, 9)])
    rows = open_pairs(tokens)
    assert rows.num_train_sequences + rows.num_validation_sequences == 8
    ids, labels = rows.train_batch(0, 0, 3, 1)
    assert ids.shape == labels.shape == (6, 64)
    chosen = rows.train_sequence_indices(0, 3)
    for place, index in enumerate(chosen.tolist()):
        better, worse = rows.samples_of_row(index)
        assert (better % 2, worse) == (0, better + 1)
        for row, sample in ((place, better), (place + 3, worse)):
            start, end = tokens.starts()[sample : sample + 2]
            assert np.array_equal(ids[row, : end - start - 1], tokens.tokens()[start : end - 1])
            assert (labels[row, end - start - 1 :] == IGNORED_LABEL).all()
    same_prompt = int((labels[0] == IGNORED_LABEL).argmin())
    assert np.array_equal(ids[0, :same_prompt], ids[3, :same_prompt])


def test_the_order_of_pairs_can_be_worked_out_again_however_a_step_is_split(tokenize: Tokenize) -> None:
    tokens = tokenize([make_pair(number) for number in range(1, 9)])
    whole = open_pairs(tokens).train_batch(1, 0, 4, 1)[0]
    halves = [open_pairs(tokens).train_batch(1, index, 2, 2)[0] for index in range(2)]
    assert np.array_equal(whole[[0, 1, 4, 5]], halves[0])
    assert np.array_equal(whole[[2, 3, 6, 7]], halves[1])


def test_a_pair_of_which_one_answer_is_cut_away_is_left_out(tokenize: Tokenize) -> None:
    long = {"prompt": "word " * 40, "chosen": "Yes.", "rejected": "No."}
    rows = open_pairs(tokenize([make_pair(1), long, make_pair(2), make_pair(3)]), sequence_length=40)
    assert rows.num_train_sequences + rows.num_validation_sequences == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Well?", "chosen": "Yes.", "rejected": "Yes."}, "line 1: chosen and rejected are the same"),
        ({"prompt": "Well?", "completion": "Yes."}, "line 1: no pair of answers"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_line(tokenize: Tokenize, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidDataset, match=message):
        tokenize([row])


def test_a_text_file_holds_no_pairs(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("In the beginning.")
    with pytest.raises(InvalidDataset, match="without pairs"):
        tokenize_dataset(file=file, format="txt", tokenizer_file=None, folder=tmp_path / "tokens", pairs=True)
