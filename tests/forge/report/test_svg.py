"""Curves as SVG: the points that were given, in a picture that is well-formed whatever they are."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from forge.report.svg import MOST_POINTS, line_chart, thinned
from forge.report.ticks import log_ticks
from tests.support.patience import PATIENCE

SVG = "{http://www.w3.org/2000/svg}"


def curves(svg: str) -> dict[str, list[tuple[float, float]]]:
    """The points of every curve, read back from the picture."""
    found = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if "data-name" in path.attrib:
            pairs = [pair.split(",") for pair in path.attrib["data-points"].split()]
            found[path.attrib["data-name"]] = [(float(x), float(y)) for x, y in pairs]
    return found


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    """What is drawn of every curve, in the picture's coordinates: one list for each stretch."""
    paths = [p for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if "data-name" in p.attrib]
    stretches = [stretch for path in paths for stretch in path.attrib["d"].split("M")[1:]]
    return [[(float(x), float(y)) for x, y in (at.split() for at in stretch.split("L"))] for stretch in stretches]


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_points_of_a_curve_are_those_that_were_given() -> None:
    points = [(i * 50, random.Random(i).random() / 3) for i in range(30)]
    assert curves(line_chart({"train": points, "val": points[::5]}, "loss")) == {"train": points, "val": points[::5]}


def test_larger_is_higher_and_later_is_further_right() -> None:
    ((one, two, three),) = drawn(line_chart({"a": [(1, 1.0), (2, 3.0), (4, 2.0)]}))
    assert one[0] < two[0] < three[0]
    assert two[1] < three[1] < one[1]
    assert two[0] - one[0] == pytest.approx((three[0] - two[0]) / 2, abs=0.02)
    assert three[1] - two[1] == pytest.approx(one[1] - three[1], abs=0.02)


def test_on_a_log_scale_equal_factors_are_equal_distances() -> None:
    ((one, two, three),) = drawn(line_chart({"a": [(0, 1e-3), (1, 1e-1), (2, 10.0)]}, log_y=True))
    assert one[1] - two[1] == pytest.approx(two[1] - three[1], abs=0.02)


def test_what_is_not_finite_is_a_gap_with_a_mark() -> None:
    values = [1.0, 2.0, math.nan, 1.5, math.inf, 3.0, 2.0]
    svg = line_chart({"a": list(enumerate(values))})
    assert [len(stretch) for stretch in drawn(svg)] == [2, 1, 2]
    assert curves(svg)["a"] == [(i, v) for i, v in enumerate(values) if math.isfinite(v)]
    assert [("nan at 2" in svg), ("inf at 4" in svg)] == [True, True]


@pytest.mark.parametrize(
    "series",
    [
        {},
        {"a": []},
        {"a": [(5, 3.0)]},
        {"a": [(0, 0.0), (1, 0.0)]},
        {"a": [(3, math.nan)]},
        {"a": [(0, 1e-299), (1, 1e299)]},
        {"a": [(0, -1.7e308), (1, 1.7e308), (2, 1.0)]},
        {"a": [(7, -2.0), (7, -2.0)]},
        {"a": [(0, 1.0), (1, 1.0 + 1e-15)]},
        {"a": [(0, 0.0), (1, 5e-324)]},
        {"a": [(0, 1e-310), (1, 3e-305)]},
    ],
)
@pytest.mark.parametrize("log_y", [False, True])
def test_little_and_odd_series_are_pictures_too(series: dict[str, list[tuple[float, float]]], log_y: bool) -> None:
    svg = line_chart(series, "odd", log_y=log_y)
    ElementTree.fromstring(svg)
    assert "nan" not in svg.replace("nan at", "")


def test_text_is_escaped_and_what_xml_cannot_hold_is_left_out() -> None:
    svg = line_chart({"<script>a</script>\x00\ud800": [(0, 1.0)], "b": []}, title='"><b>&', y_label="</svg>")
    assert {"<script>a</script>", '"><b>&', "</svg>"} <= set(texts(svg))
    assert "<script>" not in svg


@pytest.mark.slow
def test_many_points_are_drawn_by_their_extremes() -> None:
    points = [(i, random.Random(i).random()) for i in range(50_000)]
    points[31_234] = (31_234, 9.0)
    kept = thinned(points, MOST_POINTS)
    assert len(kept) <= MOST_POINTS
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert (31_234, 9.0) in kept
    assert set(kept) <= set(points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_series_are_told_apart_by_colour_and_then_by_dashes() -> None:
    svg = line_chart({str(i): [(0, float(i)), (1, float(i))] for i in range(10)})
    looks = [
        (path.attrib["stroke"], path.attrib.get("stroke-dasharray"))
        for path in ElementTree.fromstring(svg).iter(f"{SVG}path")
        if "data-name" in path.attrib
    ]
    assert len(set(looks)) == 10


def test_drawing_does_not_import_torch() -> None:
    code = "import sys; from forge.report.svg import line_chart; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


def test_ticks_of_a_log_scale_are_powers_of_ten_or_finer() -> None:
    assert log_ticks(1e-6, 2.0) == [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
    assert log_ticks(0.15, 2.5) == [0.2, 0.5, 1.0, 2.0]
