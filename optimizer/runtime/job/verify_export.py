"""Reads what was exported once, as others will, and compares it with what was trained; nothing is called exported before.

Weights: each tensor of the safetensors files, to the bit, and a model that transformers builds from config.json asks for exactly
these. Adapters: peft reads their config, each tensor is what was trained, and the factors with peft's own scaling give what merging
adds. A GGUF file: ``models/files/gguf_export/check.py``. One tensor in memory at a time, and what it is made of.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optimizer.base.errors import ExportInvalid, HeadroomError
from optimizer.base.optional import without_advice
from optimizer.models.adapters import ADAPTER_NAME, adapter_file_name, add_adapter, list_sites
from optimizer.models.build import build_unfilled
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.models.files.check_weights import check_file
from optimizer.models.files.export import published_entries
from optimizer.models.files.load import find_reads
from optimizer.models.files.readers import read_tensor, tensor_readers
from optimizer.models.files.tensor_files import TensorEntry
from optimizer.models.spec import ModelSpec
from optimizer.runtime.job.export_weights import FinalWeights
from optimizer.runtime.layers.quantized_linear import list_base_tensors

_PIECE_ELEMENTS = 1 << 20


def verify_model(folder: Path, entries: Sequence[TensorEntry], spec: ModelSpec) -> None:
    """entries: as they were written, under the model's names. Raises ExportInvalid."""
    readers = {reader.name: reader for reader in tensor_readers(folder)}
    published = list(published_entries(entries, spec))
    if readers.keys() != {entry.name for entry in published}:
        raise ExportInvalid(f"{folder.name}: {len(readers)} tensors are there, {len(published)} were written")
    for entry in published:
        _require_equal(entry, readers[entry.name].read(), where=folder.name)
    _require_buildable(folder, spec)


def verify_adapter(
    folder: Path, entries: Sequence[TensorEntry], final: FinalWeights, *, merged: Path | None
) -> None:
    """entries: as they were written, under the model's names. merged: the model's folder, where there is one. Raises
    ExportInvalid.
    """
    file = folder / "adapter_model.safetensors"
    stored = {facts.name: facts for facts in check_file(file)}
    if stored.keys() != {adapter_file_name(entry.name) for entry in entries}:
        raise ExportInvalid(f"{folder.name}: {len(stored)} tensors are there, {len(entries)} were written")
    for entry in entries:
        _require_equal(entry, read_tensor(file, stored[adapter_file_name(entry.name)]), where=folder.name)
    _require_scaling(folder, final)
    if merged is not None:
        _require_same_sum(folder, merged, final)


def _require_equal(entry: TensorEntry, stored: torch.Tensor, *, where: str) -> None:
    trained = entry.read().detach()
    same = stored.dtype == entry.dtype and tuple(stored.shape) == entry.shape == tuple(trained.shape)
    pieces = zip(trained.reshape(-1).split(_PIECE_ELEMENTS), stored.reshape(-1).split(_PIECE_ELEMENTS), strict=same)
    if not same or not all(_same_bits(piece.to(device="cpu", dtype=entry.dtype), kept) for piece, kept in pieces):
        raise ExportInvalid(f"{where}: tensor {entry.name}, read again, is not what was trained", tensor=entry.name)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _require_buildable(folder: Path, spec: ModelSpec) -> None:
    """By transformers itself, from the folder alone; our own decoder by this program."""
    try:
        if spec.model_type == DECODER_TYPE:
            model = build_unfilled(spec)
        else:
            import transformers

            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            with torch.device("meta"):
                model = getattr(transformers, spec.config["architectures"][0])(config)
        find_reads(model, folder)
    except HeadroomError as error:
        raise ExportInvalid(f"{folder.name}: what transformers builds from config.json asks for other tensors: {error}") from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ExportInvalid(f"{folder.name}: transformers does not read config.json: {error}") from error


def _require_scaling(folder: Path, final: FinalWeights) -> None:
    """What peft will scale by, reading the config itself, is what training scaled by."""
    with without_advice():
        from peft import PeftConfig

        config: Any = PeftConfig.from_pretrained(str(folder))
    scaling = float(config.lora_alpha) / config.r
    for site in list_sites(final.model):
        if site.layer.scaling[ADAPTER_NAME] != scaling:
            raise ExportInvalid(
                f"{folder.name}: peft would scale the adapter of {site.name} by {scaling:g}; it was trained with "
                f"{site.layer.scaling[ADAPTER_NAME]:g}"
            )


def _require_same_sum(adapter: Path, merged: Path, final: FinalWeights) -> None:
    """Of the first and the last adapted matrix: the base with the saved factors added is what was saved merged."""
    sites = [site for site in list_sites(final.model) if not hasattr(site.layer, "parameter_name")]
    bases = {base.name: base for base in list_base_tensors(final.model)}
    file = adapter / "adapter_model.safetensors"
    stored = {facts.name: facts for facts in check_file(file)}
    whole = {reader.name: reader for reader in tensor_readers(merged)}
    for site in {site.name: site for site in (*sites[:1], *sites[-1:])}.values():
        names = [adapter_file_name(name) for name in final.name_factors(site)]
        factors = [read_tensor(file, stored[name]) for name in names]
        base = bases[site.name]
        expected = add_adapter(base.make([final.read(name) for name in base.sources]), site, factors)
        kept = whole[site.name].read()
        rounding = torch.finfo(kept.dtype).eps + torch.finfo(factors[0].dtype).eps
        if (expected - kept.to(torch.float32)).abs().max() > 2 * rounding * expected.abs().max():
            raise ExportInvalid(
                f"{merged.name} and {adapter.name} differ: {site.name} with its saved adapter added is not what was saved merged"
            )
