"""The text and the tokenizer that ship with the program; SOURCE.md says where they come from."""

from pathlib import Path
from typing import Final

TEXT_FILE = Path(__file__).with_name("kjv.txt")
CHATS_FILE = Path(__file__).with_name("chats.jsonl")
TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
BUNDLED_ENTRIES: Final = 4096
"""Entries of the bundled tokenizer: a vocabulary that is smaller cannot use it."""
