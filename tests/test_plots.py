"""Laws of the pictures of an evaluation: every number that was measured is a point, and nothing else is."""

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from dflash.decoding.plots import acceptance_svg, budget_svg

SVG = "{http://www.w3.org/2000/svg}"


def part(budget: int | None, tau: float | None, rates: list[float | None]) -> dict[str, Any]:
    interval = None if tau is None else [tau - 0.5, tau + 0.25]
    return {"budget": budget, "tau": tau, "tau_ci95": interval, "acceptance_per_position": rates}


def summary(*trees: dict[str, Any]) -> dict[str, Any]:
    return part(None, 2.0, [0.5, 0.25, None]) | {"block_size": 4, "trees": list(trees)}


def told(svg: str) -> list[str]:
    """The tooltips, in the order of the points."""
    return [str(title.text) for title in ET.fromstring(svg).iter(f"{SVG}title")]


def heights(svg: str) -> list[float]:
    return [float(circle.attrib["cy"]) for circle in ET.fromstring(svg).iter(f"{SVG}circle")]


def test_positions_that_no_round_reached_have_no_point() -> None:
    svg = acceptance_svg(summary(part(16, 3.0, [1.0, 0.0, 0.5])))
    assert told(svg) == [
        *("chain: 0.500", "chain: 0.250"),
        *("tree of 16: 1.000", "tree of 16: 0.000", "tree of 16: 0.500"),
    ]
    half, quarter, one, zero, again = heights(svg)
    assert one < half == again < quarter < zero
    assert quarter == pytest.approx((half + zero) / 2, abs=0.1)


@pytest.mark.parametrize("budgets", [(64, 16), (16,)])
def test_trees_stand_in_the_order_of_their_budgets_with_intervals_beside_the_chain(budgets: tuple[int, ...]) -> None:
    svg = budget_svg(summary(*(part(budget, 2.0 + budget / 64, [0.5]) for budget in budgets)))
    expected = [f"trees: {2 + b / 64:.3f} [{1.5 + b / 64:.2f}, {2.25 + b / 64:.2f}]" for b in sorted(budgets)]
    assert told(svg) == [*expected, "chain: 2.000", "chain: 2.000"]
    assert svg.count("V") == len(budgets), "a whisker for each tree"


def test_nothing_measured_is_an_empty_picture() -> None:
    empty = part(None, None, []) | {"block_size": 4, "trees": [part(16, None, [])]}
    assert told(acceptance_svg(empty)) == told(budget_svg(empty)) == []
