"""Says what is in a file of prompts, and how many tokens its prompts have for a model.

    python -m optimizer.data.inspect_prompts PATH
    python -m optimizer.data.inspect_prompts PATH --count --vocab-size N [--tokenizer FILE] [--chat FILE] [--end-of-text-id N]

prints one JSON object: ``{"facts": {...}}`` or ``{"counts": [[prompt tokens, new tokens or null, lines], ...]}`` with exit
code 0, ``{"error": {...}}`` with exit code 2. It limits its own address space and CPU time, as ``inspect.py`` does.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.base.errors import HeadroomError, InvalidDataset
from optimizer.base.serialize import to_json
from optimizer.base.units import GIB
from optimizer.data.inspect import MAX_PREVIEW_CHARACTERS, limit_process
from optimizer.data.prompt_tokens import PromptTokenizer, count_tokens
from optimizer.data.prompts import PromptLine, read_prompts
from optimizer.data.texts import Texts

MAX_PROBLEMS = 50
MAX_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class LineFinding:
    """A line that will not be generated for."""

    line: int
    """From 1, in the file."""
    code: str
    message: str
    param: str | None


@dataclass(frozen=True, kw_only=True)
class PromptFacts:
    """Counts over the whole file, and its beginning."""

    num_prompts: int
    """Lines that are not blank, those that cannot be used among them."""
    num_refused: int
    num_drawing: int
    """Lines that ask for a temperature above 0 themselves."""
    num_batch_lines: int
    """Lines in the form of OpenAI's Batch API."""
    urls: dict[str, int]
    """Lines by url, of that form."""
    models: dict[str, int]
    """The same by the model that the body names; at most MAX_NAMES of them."""
    refused_by_code: dict[str, int]
    problems: tuple[LineFinding, ...]
    """The first MAX_PROBLEMS."""
    preview: str
    records: tuple[str, ...] = ()
    """The beginnings of the first prompts (``texts.py``), as is the next."""
    lengths: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


def inspect_prompts(path: str | Path) -> PromptFacts:
    """Read the whole file once. Raises InvalidDataset where it cannot be read, or holds no line."""
    num_prompts = num_batch_lines = num_drawing = 0
    urls: Counter[str] = Counter()
    models: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    problems: list[LineFinding] = []
    preview, texts = "", Texts()
    for line in read_prompts(path):
        num_prompts += 1
        num_batch_lines += line.form == "batch"
        if line.problem is not None:
            refused[line.problem.code] += 1
            if len(problems) < MAX_PROBLEMS:
                problem = line.problem
                problems.append(
                    LineFinding(line=line.number, code=problem.code, message=problem.message, param=problem.param)
                )
            continue
        num_drawing += line.settings.get("temperature", 0) > 0
        if line.form == "batch":
            urls[line.url] += 1
            if line.model in models or len(models) < MAX_NAMES:
                models[line.model] += 1
        text = _plain_text(line)
        texts.add(text)
        if len(preview) < MAX_PREVIEW_CHARACTERS:
            preview += text[:MAX_PREVIEW_CHARACTERS] + "\n---\n"
    return PromptFacts(
        num_prompts=num_prompts,
        num_refused=refused.total(),
        num_drawing=num_drawing,
        num_batch_lines=num_batch_lines,
        urls=dict(urls),
        models=dict(models),
        refused_by_code=dict(refused),
        problems=tuple(problems),
        preview=preview[:MAX_PREVIEW_CHARACTERS],
        records=tuple(texts.records),
        lengths=texts.lengths(),
    )


def _plain_text(line: PromptLine) -> str:
    if line.prompt is not None:
        return line.prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in line.messages)


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    try:
        if not options.count:
            return {"facts": inspect_prompts(options.path).to_json()}
        tokenizer = PromptTokenizer(
            options.tokenizer,
            chat_file=options.chat,
            vocab_size=options.vocab_size,
            end_of_text_id=options.end_of_text_id,
        )
        counts = count_tokens(tokenizer.encode(read_prompts(options.path)))
        return {"counts": [count.to_json() for count in counts]}
    except HeadroomError as error:
        return {"error": error.to_json()}
    except MemoryError:
        found = "more memory is needed to read it than is allowed"
        allowed = f"{options.address_space_bytes:,} bytes of memory"
        return {"error": InvalidDataset(f"prompts: {found}", field="file", value=found, allowed=allowed).to_json()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m optimizer.data.inspect_prompts", description="Say what is in a file of prompts."
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--chat", type=Path)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--end-of-text-id", type=int)
    parser.add_argument("--address-space-bytes", type=int, default=4 * GIB)
    parser.add_argument("--cpu-s", type=int, default=600)
    options = parser.parse_args(arguments)
    limit_process(address_space_bytes=options.address_space_bytes, cpu_s=options.cpu_s)
    answer = _answer(options)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 2 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
