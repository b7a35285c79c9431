"""Answers of the base and of the tuned model side by side, by transformers alone in a process of its own."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headroom.demo.jobs import DemoError
from optimizer.models.bundled import CHAT_MODEL_FOLDER
from worker.stack.home import PROGRAM_FOLDER

QUESTIONS = (
    "Give me a verse about water.",
    "Recite a verse with the word light.",
    "Say something about bread.",
    "Give me a verse about the king.",
    "Say something about wisdom.",
    "Recite a verse with the word sea.",
    "Give me a verse about fire.",
    "Say something about love.",
)
PLACE = re.compile(r"\((?:[123] )?[A-Z][A-Za-z ]* \d+:\d+\)$")
"""Answers of the chats end so, and those of the base model do not: ``(1 Kings 8:27)``."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One question to both models."""

    question: str
    base: str
    tuned: str


def names_place(answer: str) -> bool:
    return PLACE.search(answer.strip()) is not None


def ask_both(tuned_folder: Path) -> list[Answers]:
    """Raises DemoError with what transformers said where the folder does not load."""
    command = [sys.executable, str(PROGRAM_FOLDER / "demo" / "answers.py")]
    folders = [str(CHAT_MODEL_FOLDER), str(tuned_folder)]
    done = subprocess.run(
        [*command, *folders, *QUESTIONS], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or "it wrote nothing").splitlines()[-1]
        raise DemoError(f"the exported folder does not load and answer: {reason}")
    return [Answers(**json.loads(line)) for line in done.stdout.splitlines()]


def print_answers(answers: list[Answers], *, console: Console) -> None:
    table = Table("question", "before", "after", show_lines=True, width=min(console.width, 130))
    for each in answers[:_SHOWN]:
        table.add_row(each.question, each.base, each.tuned)
    console.print(table, highlight=False, markup=False)
