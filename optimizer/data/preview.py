"""Shows what training on a dataset would learn with one model: samples as its template writes them, lengths, what is cut.

    python -m optimizer.data.preview PATH --format jsonl --tokenizer tokenizer.json --chat chat.json

prints one JSON object, ``{"preview": {...}}`` with exit code 0 or ``{"error": {...}}`` with exit code 2. The process limits its
own memory and time, like ``inspect.py``: a template is a stranger's. Only the beginning of a large file is read.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.base.errors import HeadroomError, InvalidDataset
from optimizer.base.serialize import to_json
from optimizer.base.units import GIB
from optimizer.data.batches import VALIDATION_FRACTION, split_evenly
from optimizer.data.chat_facts import ChatFacts
from optimizer.data.documents import FORMATS, DatasetFormat, read_documents
from optimizer.data.inspect import limit_process
from optimizer.data.samples.answers import AnswerMarker
from optimizer.data.samples.columns import FORM, Columns, read_columns
from optimizer.data.samples.packing import pack_best_fit
from optimizer.data.samples.records import RowFormat, read_records
from optimizer.data.tokenizer import LoadedTokenizer, load_tokenizer
from optimizer.data.tokens import (
    Piece,
    document_pieces,
    encode_pieces,
    grouped,
    make_marker,
    pair_pieces,
    record_pieces,
)
from optimizer.workload import LossOn

MAX_SAMPLES = 5_000
NUM_SHOWN = 3
MAX_SHOWN_CHARACTERS = 4_000


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """One sample as text, cut into parts that are learnt and parts that are not."""

    num_tokens: int
    parts: tuple[tuple[str, bool], ...]
    """Text, and whether it is learnt."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Counts over the samples that were read, and the first of them."""

    num_samples: int
    num_characters: int
    """Text of these samples."""
    is_whole: bool
    """False if the file goes on."""
    sequence_length: int
    median_tokens: int
    longest_tokens: int
    num_cut: int
    """Samples that lose their end at the sequence length."""
    num_left_out: int
    """Samples of which nothing is left to learn."""
    learnt_share: float
    """Tokens that are learnt, of all."""
    packed_rows: int
    """Rows of the sequence length that hold all samples, packed by best fit; padded, each sample has a row."""
    epoch_rows: dict[str, int]
    """By packing, rows that training passes over in one epoch; what is kept for validation is not among them."""
    template: str
    """own, or default where the model has none."""
    samples: tuple[ShownSample, ...]


def preview_dataset(
    path: str | Path,
    *,
    format: DatasetFormat,
    tokenizer: LoadedTokenizer,
    chat: ChatFacts,
    sequence_length: int,
    loss_on: LossOn,
    columns: Columns | None = None,
) -> Preview:
    """Raises InvalidDataset with the line of the first sample that cannot be used, InvalidModel for the template."""
    marker = make_marker(chat, tokenizer=tokenizer, loss_on=loss_on)
    if format == "txt":
        pieces = document_pieces(read_documents(path))
    else:
        pieces = _read_pieces(path, format=format, columns=columns, marker=marker)
    lengths: list[int] = []
    learnt: list[int] = []
    shown: list[ShownSample] = []
    begun, is_whole = _take(pieces)
    for group in grouped(begun):
        for piece, ids, trained in encode_pieces(group, tokenizer):
            lengths.append(len(ids) - 1)
            learnt.append(sum(trained[1 : sequence_length + 1]))
            if len(shown) < NUM_SHOWN:
                shown.append(ShownSample(num_tokens=len(ids), parts=tuple(_parts(piece))))
    if not lengths:
        raise InvalidDataset("the dataset holds no text", field="dataset", value=0, allowed="at least one sample")
    whole = np.array(lengths)
    kept = np.minimum(whole, sequence_length)[(whole > 0) & (np.array(learnt) > 0)]
    return Preview(
        num_samples=len(lengths),
        num_characters=sum(len(piece.text) for piece in begun),
        is_whole=is_whole,
        sequence_length=sequence_length,
        median_tokens=int(np.median(whole)) + 1,
        longest_tokens=int(whole.max()) + 1,
        num_cut=int((whole > sequence_length).sum()),
        num_left_out=len(lengths) - len(kept),
        learnt_share=sum(learnt) / max(1, int(np.minimum(whole, sequence_length).sum())),
        packed_rows=len(pack_best_fit(kept, row_length=sequence_length)) if len(kept) else 0,
        epoch_rows=_count_epoch(kept, num_tokens=int(whole.sum()) + len(whole), row_length=sequence_length),
        template="own" if chat.template is not None else "default",
        samples=tuple(shown),
    )


def _count_epoch(kept: NDArray[np.int64], *, num_tokens: int, row_length: int) -> dict[str, int]:
    """kept: lengths of the samples that are learnt, in order; num_tokens: of the stream that wrapped rows are cut from."""
    num_wrapped = max(0, num_tokens - 1) // row_length
    wrapped = len(split_evenly(num_wrapped, VALIDATION_FRACTION)[0]) if num_wrapped >= 2 else 0
    if len(kept) < 2:
        return {"wrapped": wrapped, "best_fit": 0, "off": 0}
    training = kept[split_evenly(len(kept), VALIDATION_FRACTION)[0]]
    return {"wrapped": wrapped, "best_fit": len(pack_best_fit(training, row_length=row_length)), "off": len(training)}


def _read_pieces(
    path: str | Path, *, format: RowFormat, columns: Columns | None, marker: AnswerMarker
) -> Iterator[Piece]:
    """Pieces of each record: one, or two of a pair of answers, which no job reads but as two."""
    for record in read_records(path, format=format, columns=columns):
        yield from record_pieces([record], marker) if record.rejected is None else pair_pieces([record], marker)


def _take(pieces: Iterator[Piece]) -> tuple[list[Piece], bool]:
    """The first samples, and whether that is all."""
    begun = list(islice(pieces, MAX_SAMPLES + 1))
    return begun[:MAX_SAMPLES], len(begun) <= MAX_SAMPLES


def _parts(piece: Piece) -> Iterator[tuple[str, bool]]:
    past = 0
    for start, end in (*piece.spans, (MAX_SHOWN_CHARACTERS, MAX_SHOWN_CHARACTERS)):
        begin, stop = min(start, MAX_SHOWN_CHARACTERS), min(end, MAX_SHOWN_CHARACTERS)
        if piece.text[past:begin]:
            yield piece.text[past:begin], False
        if piece.text[begin:stop]:
            yield piece.text[begin:stop], True
        past = max(past, stop)


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    try:
        tokenizer = load_tokenizer(
            options.tokenizer, model_vocab_size=options.vocab_size, end_of_text_id=options.end_of_text_id
        )
        preview = preview_dataset(
            options.path,
            format=options.format,
            columns=read_columns(options.columns),
            tokenizer=tokenizer,
            chat=ChatFacts.read(options.chat),
            sequence_length=options.sequence_length,
            loss_on=options.loss_on,
        )
        return {"preview": to_json(preview)}
    except HeadroomError as error:
        return {"error": error.to_json()}
    except MemoryError:
        found, allowed = "more memory is needed to read it than is allowed", f"{options.address_space_bytes:,} bytes of memory"
        return {"error": InvalidDataset(f"dataset: {found}", field="dataset", value=found, allowed=allowed).to_json()}


def main(arguments: list[str]) -> int:
    name = "python -m optimizer.data.preview"
    parser = argparse.ArgumentParser(prog=name, description="Show what training on a dataset would learn.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--columns", default="", help=f"which column holds what: {FORM}")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--loss-on", choices=("all", "assistant"), default="assistant")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--chat", type=Path)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--end-of-text-id", type=int)
    parser.add_argument("--address-space-bytes", type=int, default=4 * GIB)
    parser.add_argument("--cpu-s", type=int, default=120)
    options = parser.parse_args(arguments)
    limit_process(address_space_bytes=options.address_space_bytes, cpu_s=options.cpu_s)
    answer = _answer(options)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 2 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
