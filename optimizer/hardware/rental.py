"""The price of a run: hours times the price of an hour, or the energy of a card one owns. Prices are data with a date.

``prices.toml`` in the package is replaced device by device by a file of one's own: the one that ``HEADROOM_PRICES`` names, else
``prices.toml`` under ``HEADROOM_HOME``. A device without a price has no cost; nothing is guessed from another device's. A cost
carries the date of its price and is never shown without it.

*Not modelled*: hours that are rented and not computed in (setting up, uploads, minimum terms), disks, network, taxes, spot
prices; the machine around an owned card.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from optimizer.base.errors import InvalidInput
from optimizer.base.serialize import from_json
from optimizer.hardware.device_spec import DeviceSpec
from optimizer.hardware.devices import find_device

PACKAGE_FILE = Path(__file__).with_name("prices.toml")
FILE_VARIABLE = "HEADROOM_PRICES"
HOME_VARIABLE = "HEADROOM_HOME"
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Rental:
    """One provider's price of one device."""

    device: str
    """A name that the device table knows; the table's own spelling once read."""
    provider: str
    price_per_hour: float
    currency: str
    date: str
    """Date of the price, as 2025-06-30."""
    source: str

    def __post_init__(self) -> None:
        _check("price_per_hour", self.price_per_hour, self.currency, self.date)


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """The price of buying a card."""

    device: str
    price: float
    currency: str
    date: str
    source: str

    def __post_init__(self) -> None:
        _check("price", self.price, self.currency, self.date)


@dataclass(frozen=True, kw_only=True)
class Electricity:
    """The price of power."""

    price_per_kwh: float
    currency: str
    date: str
    source: str

    def __post_init__(self) -> None:
        _check("price_per_kwh", self.price_per_kwh, self.currency, self.date)


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """All prices there are."""

    rentals: tuple[Rental, ...] = ()
    purchases: tuple[Purchase, ...] = ()
    electricity: Electricity | None = None

    def rental(self, device: str) -> Rental | None:
        """The cheapest of the device as the table spells it, None where no price is known. Prices of different currencies are
        not compared: the first row's currency counts."""
        found = [row for row in self.rentals if row.device == device]
        same_currency = [row for row in found if row.currency == found[0].currency]
        return min(same_currency, key=lambda row: row.price_per_hour, default=None)

    def purchase(self, device: str) -> Purchase | None:
        """The newest price of the device."""
        found = [row for row in self.purchases if row.device == device]
        return max(found, key=lambda row: row.date, default=None)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The price of a run in one way of having the device."""

    kind: Literal["rented", "energy"]
    """Way of having the device; ``energy`` is of a card one owns, at the power its board may draw, and an upper bound."""
    amount: float
    amount_low: float
    amount_high: float
    """From and to, as the predicted time has it; the price itself is taken as it stands."""
    per_million_tokens: float | None
    """Price of a million tokens; None without tokens to count."""
    currency: str
    price: float
    """Price of an hour, or of a kWh."""
    price_date: str
    provider: str
    """The provider that rents it; for energy the source of the price of power."""

    def describe(self) -> str:
        """One line for people, with the date."""
        unit = "h" if self.kind == "rented" else "kWh"
        tokens = "" if self.per_million_tokens is None else f", {_amount(self.per_million_tokens)} per million tokens"
        what = "rent" if self.kind == "rented" else "energy at full board power"
        has_span = self.amount_low < self.amount_high
        span = f", {_amount(self.amount_low)} to {_amount(self.amount_high)}" if has_span else ""
        return (
            f"{what}: {self.currency} {_amount(self.amount)}{span}{tokens} "
            f"({self.currency} {self.price:g}/{unit}, {self.provider}, price of {self.price_date})"
        )


def read_prices(*, environment: Mapping[str, str] | None = None) -> PriceList:
    """The package's prices and, device by device in their place, those of one's own file.

    Raises InvalidInput where the own file cannot be read, with the dotted path of what is wrong in it.
    """
    prices = parse_prices(tomllib.loads(PACKAGE_FILE.read_text(encoding="utf-8")), path="prices.toml")
    own_file = _own_file(os.environ if environment is None else environment)
    if own_file is None:
        return prices
    try:
        document = tomllib.loads(own_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"prices in {own_file} cannot be read: {error}",
            field=FILE_VARIABLE,
            value=str(own_file),
            hint="docs/devices.md shows such a file.",
        ) from error
    return merge_prices(prices, own=parse_prices(document, path=own_file.name))


def parse_prices(document: Any, *, path: str) -> PriceList:
    """Prices of a parsed TOML document. Raises InvalidInput for a wrong row and for a device that is not in the table."""
    prices = from_json(PriceList, document, path=path)
    return replace(
        prices,
        rentals=tuple(replace(row, device=find_device(row.device).name) for row in prices.rentals),
        purchases=tuple(replace(row, device=find_device(row.device).name) for row in prices.purchases),
    )


def merge_prices(prices: PriceList, *, own: PriceList) -> PriceList:
    """``own`` wins: of a device that it names, no other rental (or purchase) is left."""
    rented = {row.device for row in own.rentals}
    bought = {row.device for row in own.purchases}
    return PriceList(
        rentals=(*own.rentals, *(row for row in prices.rentals if row.device not in rented)),
        purchases=(*own.purchases, *(row for row in prices.purchases if row.device not in bought)),
        electricity=own.electricity or prices.electricity,
    )


def price_run(
    prices: PriceList,
    *,
    device: str,
    total_s: float,
    interval_s: tuple[float, float] | None = None,
    num_tokens: int | None = None,
) -> tuple[Cost, ...]:
    """Costs of ``total_s`` seconds on the device: to rent, and in energy on a card of one's own. Empty where no price is known.

    interval_s: from and to, around ``total_s``; None for a time that was measured.
    device: a name of the table, as ``Machine.device.name`` has it; others have no price.
    Raises InvalidInput for a time or a number of tokens below zero.
    """
    if total_s < 0 or (num_tokens is not None and num_tokens < 0):
        raise InvalidInput(
            f"a run of {total_s} s and {num_tokens} tokens has no cost; allowed: 0 or more",
            field="total_s" if total_s < 0 else "num_tokens",
            value=total_s if total_s < 0 else num_tokens,
        )
    spec = _known_device(device)
    if spec is None:
        return ()
    low_s, high_s = interval_s or (total_s, total_s)
    hours = tuple(seconds / _SECONDS_PER_HOUR for seconds in (total_s, low_s, high_s))
    rental, electricity = prices.rental(spec.name), prices.electricity
    costs = []
    if rental is not None:
        costs.append(_rental_cost(rental, hours=hours, num_tokens=num_tokens))
    if electricity is not None:
        costs.append(_energy_cost(electricity, kwh=[each * spec.power_w / 1000 for each in hours], num_tokens=num_tokens))
    return tuple(costs)


def describe_costs(costs: tuple[Cost, ...], *, device: str) -> list[str]:
    """Describe the costs for people; says so where nothing is known."""
    if not costs:
        return [f"no price of {device} is known, so no cost is given; docs/devices.md says how to add one"]
    return [cost.describe() for cost in costs]


def _own_file(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(FILE_VARIABLE)
    if named:
        return Path(named)
    home = environment.get(HOME_VARIABLE)
    found = Path(home) / "prices.toml" if home else None
    return found if found is not None and found.is_file() else None


def _known_device(name: str) -> DeviceSpec | None:
    try:
        return find_device(name)
    except InvalidInput:
        return None


def _rental_cost(rental: Rental, *, hours: Sequence[float], num_tokens: int | None) -> Cost:
    """hours: as predicted, from, and to."""
    amount, low, high = (each * rental.price_per_hour for each in hours)
    return Cost(
        kind="rented",
        amount=amount,
        amount_low=low,
        amount_high=high,
        per_million_tokens=_per_million(amount, num_tokens),
        currency=rental.currency,
        price=rental.price_per_hour,
        price_date=rental.date,
        provider=f"{rental.provider}, {rental.source}",
    )


def _energy_cost(electricity: Electricity, *, kwh: Sequence[float], num_tokens: int | None) -> Cost:
    """kwh: as predicted, from, and to."""
    amount, low, high = (each * electricity.price_per_kwh for each in kwh)
    return Cost(
        kind="energy",
        amount=amount,
        amount_low=low,
        amount_high=high,
        per_million_tokens=_per_million(amount, num_tokens),
        currency=electricity.currency,
        price=electricity.price_per_kwh,
        price_date=electricity.date,
        provider=electricity.source,
    )


def _per_million(amount: float, num_tokens: int | None) -> float | None:
    return amount / num_tokens * 1e6 if num_tokens else None


def _amount(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _check(name: str, value: float, currency: str, day: str) -> None:
    if value < 0:
        raise InvalidInput(f"prices: {name} is {value}; allowed: 0 or more", field=name, value=value)
    if len(currency) != 3 or not currency.isupper():
        raise InvalidInput(
            f"prices: currency is {currency!r}; allowed: three capital letters such as USD",
            field="currency",
            value=currency,
        )
    try:
        date.fromisoformat(day)
    except ValueError as error:
        raise InvalidInput(
            f"prices: date is {day!r}; allowed: a day such as 2025-06-30", field="date", value=day
        ) from error
