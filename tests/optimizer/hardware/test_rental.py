"""Prices are dated data, a cost is hours times a price, and what is not known is not guessed."""

from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import InvalidInput
from optimizer.hardware.devices import find_device
from optimizer.hardware.rental import (
    Electricity,
    PriceList,
    Purchase,
    Rental,
    describe_costs,
    merge_prices,
    parse_prices,
    price_run,
    read_prices,
)


def rental(device: str = "RTX 4090", price: float = 0.5, **others: str) -> Rental:
    fields = {"provider": "someone", "currency": "USD", "date": "2025-06-01", "source": "an offer"} | others
    return Rental(device=device, price_per_hour=price, **fields)


POWER = Electricity(price_per_kwh=0.2, currency="EUR", date="2025-05-01", source="the bill")
OWN = """
[[rentals]]
device = "NVIDIA GeForce RTX 4090"
provider = "next door"
price_per_hour = 0.11
currency = "EUR"
date = "2026-11-01"
source = "agreed"
"""


def test_rent_is_hours_times_the_price_of_an_hour() -> None:
    (cost,) = price_run(PriceList(rentals=(rental(),)), device="RTX 4090", total_s=7200, num_tokens=4_000_000)
    assert (cost.kind, cost.amount, cost.per_million_tokens, cost.currency) == ("rented", 1.0, 0.25, "USD")


def test_energy_is_the_boards_power_for_the_hours() -> None:
    (cost,) = price_run(PriceList(electricity=POWER), device="RTX 4090", total_s=3600)
    assert cost.kind == "energy"
    assert cost.amount == pytest.approx(find_device("RTX 4090").power_w / 1000 * 0.2)
    assert cost.per_million_tokens is None


def test_the_cheapest_of_several_offers_counts_and_currencies_are_not_mixed() -> None:
    prices = PriceList(rentals=(rental(price=0.9), rental(price=0.4), rental(price=0.1, currency="EUR")))
    found = prices.rental("RTX 4090")
    assert found is not None
    assert (found.price_per_hour, found.currency) == (0.4, "USD")


def test_the_newest_purchase_price_counts() -> None:
    rows = tuple(
        Purchase(device="RTX 3090", price=price, currency="USD", date=day, source="a shop")
        for price, day in ((1499.0, "2020-09-24"), (700.0, "2025-06-01"))
    )
    found = PriceList(purchases=rows).purchase("RTX 3090")
    assert found is not None
    assert found.price == 700.0


@pytest.mark.parametrize("device", ["cpu", "Voodoo 2", "RTX 3090"])
def test_a_device_without_a_price_has_no_cost_and_it_is_said(device: str) -> None:
    costs = price_run(PriceList(rentals=(rental(),)), device=device, total_s=60)
    assert costs == ()
    assert describe_costs(costs, device=device)[0].startswith(f"no price of {device} is known, so no cost is given")


def test_a_cost_is_shown_with_the_date_of_its_price() -> None:
    costs = price_run(
        PriceList(rentals=(rental(),), electricity=POWER), device="RTX 4090", total_s=3600, num_tokens=10**9
    )
    rented, energy = describe_costs(costs, device="RTX 4090")
    expected = "rent: USD 0.50, 0.0005 per million tokens (USD 0.5/h, someone, an offer, price of 2025-06-01)"
    assert rented == expected
    assert energy.endswith("(EUR 0.2/kWh, the bill, price of 2025-05-01)")


@pytest.mark.parametrize(("total_s", "num_tokens"), [(-1.0, None), (1.0, -1)])
def test_less_than_nothing_has_no_cost(total_s: float, num_tokens: int | None) -> None:
    with pytest.raises(InvalidInput, match="allowed: 0 or more"):
        price_run(PriceList(), device="T4", total_s=total_s, num_tokens=num_tokens)


def test_the_packages_prices_are_of_known_devices_and_dated() -> None:
    prices = read_prices(environment={})
    assert len(prices.rentals) >= 10
    assert len(prices.purchases) >= 20
    rows: list[Rental | Purchase] = [*prices.rentals, *prices.purchases]
    for row in rows:
        assert find_device(row.device).name == row.device
        assert "2016" < row.date < "2027"
        assert row.source


@pytest.mark.parametrize("variable", ["HEADROOM_PRICES", "HEADROOM_HOME"])
def test_ones_own_file_replaces_a_devices_offers_and_leaves_the_others(tmp_path: Path, variable: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(OWN)
    prices = read_prices(environment={variable: str(file if variable == "HEADROOM_PRICES" else tmp_path)})
    assert [row.provider for row in prices.rentals if row.device == "RTX 4090"] == ["next door"]
    packaged = read_prices(environment={})
    assert prices.rental("T4") == packaged.rental("T4")
    assert prices.electricity == packaged.electricity


def test_ones_own_electricity_replaces_the_packages() -> None:
    assert merge_prices(read_prices(environment={}), own=PriceList(electricity=POWER)).electricity == POWER


def test_a_home_without_prices_is_fine(tmp_path: Path) -> None:
    assert read_prices(environment={"HEADROOM_HOME": str(tmp_path)}) == read_prices(environment={})


@pytest.mark.parametrize("content", [None, "[[rentals", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInput, match=r"prices in .*mine\.toml cannot be read"):
        read_prices(environment={"HEADROOM_PRICES": str(file)})


def test_a_misspelt_key_is_refused_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(OWN.replace("price_per_hour", "per_hour"))
    with pytest.raises(InvalidInput, match=r"mine\.toml\.rentals\[0\]"):
        read_prices(environment={"HEADROOM_PRICES": str(file)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"price": -1.0}, "price_per_hour is -1.0"),
        ({"currency": "dollars"}, "currency is 'dollars'"),
        ({"date": "June"}, "date is 'June'"),
    ],
)
def test_a_row_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rental(**changed)


def test_a_price_of_an_unknown_device_is_refused() -> None:
    row = {"device": "Voodoo 2", "provider": "x", "price_per_hour": 1.0, "currency": "USD"}
    with pytest.raises(InvalidInput, match="GPU 'Voodoo 2' is not in the table"):
        parse_prices({"rentals": [row | {"date": "2025-06-01", "source": "x"}]}, path="prices.toml")


def test_a_cost_is_as_uncertain_as_its_time() -> None:
    prices = PriceList(rentals=(rental(),))
    (cost,) = price_run(prices, device="RTX 4090", total_s=7200, interval_s=(3600, 14400))
    assert (cost.amount_low, cost.amount_high) == pytest.approx((cost.amount / 2, cost.amount * 2))
    low, high = f"{cost.amount_low:.2f}", f"{cost.amount_high:.2f}"
    assert f", {low} to {high} (" in cost.describe()
    (measured,) = price_run(prices, device="RTX 4090", total_s=7200)
    assert measured.amount_low == measured.amount == measured.amount_high
    assert " to " not in measured.describe()
