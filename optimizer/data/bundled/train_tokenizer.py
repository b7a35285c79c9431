"""Makes ``bundled/tokenizer.json``: a byte-level BPE of 4,096 entries trained on the bundled text.

    python -m optimizer.data.bundled.train_tokenizer [TEXT] [TOKENIZER.json]

Byte-level, so any text can be written in it; entry 0 is the end-of-text token. The same text gives the same file, byte for byte.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from optimizer.data.bundled import END_OF_TEXT, TEXT_FILE, TOKENIZER_FILE

VOCAB_SIZE = 4_096


def train_tokenizer(text_file: Path, *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with text_file.open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def main(arguments: list[str]) -> None:
    text_file = Path(arguments[0]) if arguments else TEXT_FILE
    tokenizer_file = Path(arguments[1]) if len(arguments) > 1 else TOKENIZER_FILE
    tokenizer = train_tokenizer(text_file)
    tokenizer.save(str(tokenizer_file))
    sys.stdout.write(f"{tokenizer_file}: {tokenizer.get_vocab_size():,} entries\n")


if __name__ == "__main__":
    main(sys.argv[1:])
