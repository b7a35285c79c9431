"""Reads what was exported once, as others will, and compares it with what was trained; nothing is called exported before.

Weights: each tensor of the safetensors files, to the bit, and a model that transformers builds from config.json asks for
exactly these. Adapters: peft reads their config, each tensor is what was trained, and the factors with peft's own scaling
give what merging adds. A GGUF file: ``models/files/gguf_export/check.py``. One tensor in memory at a time, and what it is
made of.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from optimizer.base.errors import ExportInvalid, HeadroomError
from optimizer.base.optional import without_advice
from optimizer.models.adapters import ADAPTER_NAME, Site, adapter_file_name, add_adapter, list_sites
from optimizer.models.build import build_unfilled
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.models.files.check_weights import TensorFacts, check_file
from optimizer.models.files.export import published_entries
from optimizer.models.files.load import find_reads
from optimizer.models.files.readers import read_tensor
from optimizer.models.files.tensor_files import TensorEntry
from optimizer.models.spec import ModelSpec
from optimizer.runtime.job.export.export_weights import FinalWeights
from optimizer.runtime.layers.quantized_linear import BaseTensor, list_base_tensors

_PIECE_ELEMENTS = 1 << 20


def verify_model(folder: Path, entries: Sequence[TensorEntry], spec: ModelSpec) -> None:
    """entries: as they were written, under the model's names. Raises ExportInvalid."""
    stored = _list_stored(folder)
    published = published_entries(entries, spec)
    if stored.keys() != {entry.name for entry in published}:
        raise ExportInvalid(f"{folder.name}: {len(stored)} tensors are there, {len(published)} were written")
    for entry in published:
        _require_equal(entry, *stored[entry.name], where=folder.name)


def verify_adapter(
    folder: Path, entries: Sequence[TensorEntry], final: FinalWeights, *, merged: Path | None
) -> None:
    """entries: as they were written, under the model's names. merged: the model's folder, where there is one. Raises
    ExportInvalid.
    """
    stored = _list_stored(folder)
    if stored.keys() != {adapter_file_name(entry.name) for entry in entries}:
        raise ExportInvalid(f"{folder.name}: {len(stored)} tensors are there, {len(entries)} were written")
    for entry in entries:
        _require_equal(entry, *stored[adapter_file_name(entry.name)], where=folder.name)
    _require_scaling(folder, final)
    if merged is not None:
        _require_same_sum(folder, merged, final)


def _list_stored(folder: Path) -> dict[str, tuple[Path, TensorFacts]]:
    """Each tensor of a folder's files, by name."""
    return {facts.name: (file, facts) for file in sorted(folder.glob("*.safetensors")) for facts in check_file(file)}


def _require_equal(entry: TensorEntry, file: Path, facts: TensorFacts, *, where: str) -> None:
    trained = entry.read().detach()
    same = facts.num_bytes == entry.num_bytes and facts.shape == entry.shape == tuple(trained.shape)
    if not same or not all(_same_pieces(trained, entry, file, offset_bytes=facts.offset_bytes)):
        raise ExportInvalid(f"{where}: tensor {entry.name}, read again, is not what was trained", tensor=entry.name)


def _same_pieces(trained: torch.Tensor, entry: TensorEntry, file: Path, *, offset_bytes: int) -> Iterator[bool]:
    """Bytes against bytes, as they were written."""
    with file.open("rb") as stream:
        stream.seek(offset_bytes)
        for piece in torch.split(trained.reshape(-1), _PIECE_ELEMENTS):
            written = piece.to(device="cpu", dtype=entry.dtype, copy=True).contiguous().view(torch.uint8).numpy()
            is_same = stream.read(written.nbytes) == written.tobytes()
            del written
            yield is_same


def verify_buildable(folder: Path, spec: ModelSpec) -> None:
    """By transformers itself, from the folder alone; our own decoder by this program. Raises ExportInvalid."""
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
        raise ExportInvalid(f"{folder.name}: its config.json asks for other tensors: {error}") from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ExportInvalid(f"{folder.name}: transformers does not read config.json: {error}") from error


def _require_scaling(folder: Path, final: FinalWeights) -> None:
    """Check that peft, reading the config itself, will scale as training did."""
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
    """Check the first and the last adapted matrix: the base with the saved factors added is what was saved merged."""
    sites = [site for site in list_sites(final.model) if not hasattr(site.layer, "parameter_name")]
    bases = {base.name: base for base in list_base_tensors(final.model)}
    stored = _list_stored(adapter)
    whole = _list_stored(merged)
    for site in {site.name: site for site in (*sites[:1], *sites[-1:])}.values():
        _require_site(site, bases[site.name], final, stored=stored, whole=whole)


def _require_site(
    site: Site,
    base: BaseTensor,
    final: FinalWeights,
    *,
    stored: Mapping[str, tuple[Path, TensorFacts]],
    whole: Mapping[str, tuple[Path, TensorFacts]],
) -> None:
    names = [adapter_file_name(name) for name in final.name_factors(site)]
    factors = [read_tensor(*stored[name]) for name in names]
    expected = add_adapter(base.make([final.read(name) for name in base.sources]), site, factors)
    kept = read_tensor(*whole[site.name])
    largest = torch.linalg.vector_norm(expected, ord=float("inf"))
    rounding = torch.finfo(kept.dtype).eps + torch.finfo(factors[0].dtype).eps
    if torch.linalg.vector_norm(expected.sub_(kept), ord=float("inf")) > 2 * rounding * largest:
        raise ExportInvalid(
            f"model and adapter differ: {site.name} with its saved adapter added is not what was saved merged"
        )
