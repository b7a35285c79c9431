"""Profiles of published models, each traced once, as far as its rows need it: with the models' own layers, as the programs that
were measured ran them. Training profiles are kept on disk.
"""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.published.generations import PublishedGeneration
from benchmarks.published.rows import PublishedRow
from optimizer.formats.stock_layers import stock_layers
from optimizer.profile.extent import Extent
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.keep.obtain import obtain_profile
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.profile import Profile
from optimizer.profile.trace.generation import profile_generation

Key = tuple[object, ...]


class Profiles:
    """Rows of one model mostly stand together, so only the last profile of each kind is held."""

    def __init__(self, rows: Iterable[PublishedRow] = (), *, folder: Path | None = None) -> None:
        """rows: all that will be asked for, so that each model is traced for them at once; folder: as for ``obtain_profile``."""
        self._folder = folder
        self._extents: dict[Key, Extent] = {}
        for row in rows:
            extent = _extent_of(row)
            known = self._extents.get(row.shape_key)
            self._extents[row.shape_key] = extent if known is None else known.union(extent)
        self._training: tuple[Key, Profile] | None = None
        self._generation: tuple[Key, GenerationProfile] | None = None

    def training(self, row: PublishedRow) -> Profile:
        if self._training is None or self._training[0] != row.shape_key:
            extent = self._extents.get(row.shape_key) or _extent_of(row)
            with stock_layers():
                profile = obtain_profile(row.spec(), adapter=row.workload().adapter, extent=extent, folder=self._folder)
            self._training = (row.shape_key, profile)
        return self._training[1]

    def generation(self, row: PublishedGeneration) -> GenerationProfile:
        key = (*row.shape_key, row.representation)
        if self._generation is None or self._generation[0] != key:
            self._generation = (key, profile_generation(row.spec(), representations=[row.representation]))
        return self._generation[1]


def _extent_of(row: PublishedRow) -> Extent:
    return extent_of_plans([row.plan(num_blocks=row.layers)], workload=row.workload())
