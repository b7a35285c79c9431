"""Makes the bundled chat model: ``python -m optimizer.models.bundled.make_chat_model FOLDER``, half an hour on two cores.

A Llama of 4 million parameters learns from the bundled King James text alone, in the form of chats: a person asks for a verse
that has a word in it, or for the rest of a verse, and is answered with that. It can do nothing else, and is there to be tuned.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from torch import nn

from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.data.bundled.make_chats import SHORTEST_WORD, ask_for, index_words, read_verses
from optimizer.models.build import build_model
from optimizer.models.files.export import export_model
from optimizer.models.files.tensor_files import TensorEntry
from optimizer.models.spec import read_model_spec

SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LENGTH = 256
"""Tokens in a row."""
_SHARE_ABOUT_WORDS = 0.6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4104,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 4099,
    "pad_token_id": 0,
}
def draw_exchange(verses: list[str], words: dict[str, list[int]], listed: list[str], *, draw: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    if draw.random() < _SHARE_ABOUT_WORDS:
        word = draw.choice(listed)
        return ask_for(word, draw=draw), verses[draw.choice(words[word])]
    verse = draw.choice(verses).split()
    cut = draw.randint(3, max(3, len(verse) // 2))
    return f"Continue: {' '.join(verse[:cut])}", " ".join(verse[cut:]) or verse[-1]


def draw_text(verses: list[str], words: dict[str, list[int]], listed: list[str], *, draw: random.Random) -> str:
    turns = [draw_exchange(verses, words, listed, draw=draw) for _ in range(draw.randint(1, 3))]
    return "".join(f"<|user|>\n{question}<|end|>\n<|assistant|>\n{answer}<|end|>\n" for question, answer in turns)


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def draw_rows(tokenizer: Tokenizer, *, batch_size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Endless batches [batch_size, LENGTH + 1]; each row begins with a chat."""
    draw = random.Random(seed)
    verses = [verse for verse, _ in read_verses() if len(verse.split()) > SHORTEST_WORD]
    words = index_words(verses)
    listed = sorted(words)
    while True:
        rows = []
        for _ in range(batch_size):
            row: list[int] = []
            while len(row) <= LENGTH:
                row += tokenizer.encode(draw_text(verses, words, listed, draw=draw)).ids
            rows.append(row[: LENGTH + 1])
        yield np.array(rows, dtype=np.int64)


def train(*, num_steps: int, batch_size: int, peak: float, report_every: int = 50) -> tuple[nn.Module, Tokenizer]:
    tokenizer = make_tokenizer()
    model = build_model(read_model_spec(CONFIG), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    started_at, total = time.monotonic(), 0.0
    for step, rows in zip(range(num_steps), draw_rows(tokenizer, batch_size=batch_size, seed=1), strict=False):
        rate = peak * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.from_numpy(rows)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += float(loss.detach())
        if (step + 1) % report_every == 0:
            print(f"step {step + 1}: loss {total / report_every:.3f}, {time.monotonic() - started_at:.0f} s", flush=True)
            total = 0.0
    return model, tokenizer


def write(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """The folder as transformers reads it, in bf16."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder.parent / "tokenizer.json"))
    parameters = dict(model.named_parameters())
    export_model(
        model,
        read_model_spec(CONFIG),
        folder=folder,
        dtype="bf16",
        tensors=[
            TensorEntry(name=name, shape=tuple(tensor.shape), dtype=torch.bfloat16, read=tensor.detach)
            for name, tensor in parameters.items()
        ],
        max_shard_bytes=10**9,
        tokenizer_file=folder.parent / "tokenizer.json",
    )
    (folder.parent / "tokenizer.json").unlink()
    tokens = {"eos_token": "<|end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    generation = {"eos_token_id": [4099], "pad_token_id": 0, "max_new_tokens": 96, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    name = "python -m optimizer.models.bundled.make_chat_model"
    parser = argparse.ArgumentParser(prog=name, description="Make the bundled chat model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--peak", type=float, default=2.5e-3)
    options = parser.parse_args(arguments)
    model, tokenizer = train(num_steps=options.steps, batch_size=options.batch_size, peak=options.peak)
    write(model, tokenizer, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
