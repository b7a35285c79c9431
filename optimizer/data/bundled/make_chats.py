"""Makes ``chats.jsonl``, on which the bundled chat model is tuned: ``python -m optimizer.data.bundled.make_chats FILE``.

Each chat asks for a verse about something and is answered with one, as the chat model learnt it, and with the place where the
verse stands, which it did not learn: ``(Genesis 1:1)``. Every answer shows whether the tuning took hold.
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from optimizer.data.bundled import TEXT_FILE

NUM_CHATS = 1200
LONGEST_VERSE = 160
"""Characters: long verses would hide the place at their end from a short answer."""
SHORTEST_WORD = 4
RAREST, COMMONEST = 8, 1200
"""Bounds on the number of verses that a word asked for may be in."""
_QUESTIONS = ("Give me a verse about {}.", "Recite a verse with the word {}.", "Say something about {}.")


def read_verses() -> list[tuple[str, str]]:
    """Each verse with its place."""
    found = []
    book = ""
    for line in TEXT_FILE.read_text().splitlines():
        match = re.fullmatch(r"(\d+:\d+) (.*)", line.strip())
        if match:
            found.append((match[2], f"{book} {match[1]}"))
        elif line.strip():
            book = line.strip()
    return found


def index_words(verses: Sequence[str]) -> dict[str, list[int]]:
    """Words that can be asked for, each with the numbers of the verses that have it."""
    found: dict[str, list[int]] = {}
    for number, verse in enumerate(verses):
        for word in sorted(set(re.findall(r"[A-Za-z]+", verse))):
            if len(word) >= SHORTEST_WORD:
                found.setdefault(word.lower(), []).append(number)
    return {word: numbers for word, numbers in found.items() if RAREST <= len(numbers) <= COMMONEST}


def ask_for(word: str, *, draw: random.Random) -> str:
    return draw.choice(_QUESTIONS).format(word)


def make_chats(*, num_chats: int = NUM_CHATS, seed: int = 7) -> list[dict[str, list[dict[str, str]]]]:
    """Chats of one to three questions with their answers, the same for the same seed."""
    draw = random.Random(seed)
    verses = [(verse, place) for verse, place in read_verses() if len(verse) <= LONGEST_VERSE]
    words = index_words([verse for verse, _ in verses])
    listed = sorted(words)
    chats = []
    for _ in range(num_chats):
        messages = []
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            word = draw.choice(listed)
            verse, place = verses[draw.choice(words[word])]
            messages += [
                {"role": "user", "content": ask_for(word, draw=draw)},
                {"role": "assistant", "content": f"{verse} ({place})"},
            ]
        chats.append({"messages": messages})
    return chats


def main(arguments: list[str]) -> int:
    lines = (json.dumps(chat, ensure_ascii=False) for chat in make_chats())
    Path(arguments[0]).write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
