import csv
from pathlib import Path
from typing import Any

import pytest
from answering import answers_of
from matplotlib.figure import Figure
from PIL import Image

import eval.figures
from eval.answers import Answer
from eval.drawing import legend, panels, place_labels, save, shortened
from eval.figures import draw_all, draw_overview
from eval.labels import CHECKPOINT_NAMES, SYSTEM_COLOURS, SYSTEM_MARKERS, SYSTEM_NAMES
from eval.looks import arm_looks
from eval.summary import summarize
from recipes.evaluation import EvalConfig

BASE = [0.0, 0.5, 0.0, 0.5]
TUNED = [0.5, 1.0, 0.5, 1.0]
PICTURES = ["f1_under_budget", "f1_against_tokens", "errors"]


def content(answers: list[Answer]) -> dict[str, Any]:
    return {"recipe": "tiny", **summarize(answers, resamples=50, seed=0)}


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return [
        *answers_of(BASE, k=5, ttft_ms=[20.0], active_tokens=60),
        *answers_of(TUNED, k=20, ttft_ms=[60.0], active_tokens=200),
        *answers_of(TUNED, k=20, checkpoint="fine_tuned", error_kinds=["bridge_gap"]),
        *answers_of(BASE, system="standard_rag", k=None, active_tokens=700, ttft_ms=[900.0]),
    ]


@pytest.fixture(scope="module")
def drawn(answers: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return draw_all(content(answers), tmp_path_factory.mktemp("drawn") / "figures")


def test_every_figure_has_two_pictures_and_its_numbers(drawn: list[Path]) -> None:
    expected = [f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg", "csv")]
    assert [path.name for path in drawn] == [*expected, "budget.csv"]
    assert sorted(drawn) == sorted(drawn[0].parent.iterdir()), "nothing temporary is left"
    for path in drawn[::3][:-1]:
        with Image.open(path) as image:
            assert image.width >= 1200


def test_the_numbers_beside_a_picture_are_those_it_shows(drawn: list[Path]) -> None:
    steps = table(drawn[2])
    assert [
        (row["panel"], row["system"], row["k"], row["ttft_p99_ms"], row["best_without_limit"])
        for row in steps
        if row["panel"] != "musique" and row["checkpoint"] == "base"
    ] == [
        (panel, *rest)
        for panel in ("all questions", "hotpotqa")
        for rest in (
            ("standard_rag", "", "900.0", "True"),
            ("coinrag", "5", "20.0", "False"),
            ("coinrag", "20", "60.0", "True"),
        )
    ]
    tokens = {(row["panel"], row["k"], row["checkpoint"]): row for row in table(drawn[5])}
    assert len(tokens) == 3 * 4
    assert tokens["musique", "5", "base"]["f1"] == "25.0"
    assert tokens["musique", "5", "base"]["f1_low"] == ""
    assert {key for key, row in tokens.items() if row["on_front"] == "True"} == {
        (panel, k, checkpoint)
        for panel in ("all questions", "hotpotqa", "musique")
        for k, checkpoint in (("5", "base"), ("20", "fine_tuned"))
    }
    errors = table(drawn[8])
    assert [(row["wrong"], row["bridge_gap"]) for row in errors] == [
        ("4", "0"), ("4", "0"), ("2", "0"), ("2", "4"),
    ]  # fmt: skip


def test_the_table_within_budgets_keeps_points_and_percent_apart(drawn: list[Path]) -> None:
    rows = {(row["budget_ms"], row["system"], row["checkpoint"]): row for row in table(drawn[-1])}
    full = rows["", "standard_rag", "base"]
    assert (full["f1"], full["f1 musique"], full["coinrag_k"]) == ("25.0", "25.0", "20")
    assert (full["f1_points_mean"], full["relative_percent"]) == ("-50.0", str(-100 * 50 / 75))
    assert rows["100.0", "coinrag", "base"]["relative_percent"] == ""
    assert ("100.0", "standard_rag", "base") not in rows


def test_arms_have_points_at_one_width_and_steps_at_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawings = []
    monkeypatch.setattr(
        eval.figures,
        "save",
        lambda draw, paths: [drawings.append(draw), *(path.touch() for path in paths)],
    )
    one = [*answers_of(BASE, ttft_ms=[20.0]), *answers_of(TUNED, arm="isolated", ttft_ms=[9.0])]
    assert len(draw_all(content(one), tmp_path)) == 4 * 3 + 1
    rows = table(tmp_path / "ablations.csv")
    assert [row["arm"] for row in rows] == ["", "isolated"] * 3
    assert "ttft_p99_ms" not in rows[0]
    several = [*one, *answers_of(TUNED, k=20, ttft_ms=[30.0])]
    draw_all(content(several), tmp_path)
    rows = table(tmp_path / "ablations.csv")[:3]
    assert [(row["arm"], row["k"], row["ttft_p99_ms"]) for row in rows] == [
        ("", "10", "20.0"), ("", "20", "30.0"), ("isolated", "10", "9.0"),
    ]  # fmt: skip
    # Two curves with a star each in three panels; 100 ms is out of range.
    axes = drawings[6]().axes
    assert [len(axis.lines) for axis in axes] == [2 * 2] * 3
    draw_all(content(answers_of(BASE)), tmp_path)
    assert not list(tmp_path.glob("ablations.*")), "there are no arms any more"


def test_the_same_numbers_give_the_same_svg_and_names_are_no_markup(tmp_path: Path) -> None:
    name = r"$\frac{<b>&$ _x"
    made = [*answers_of(BASE, dataset="a<b$&$"), *answers_of(TUNED, dataset="a<b$&$", arm=name)]
    result = {**content(made), "recipe": name}
    for folder in ("first", "second"):
        draw_all(result, tmp_path / folder)
    for path in (tmp_path / "first").glob("*.svg"):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
        assert b"<dc:date>" not in path.read_bytes()
    assert {row["arm"] for row in table(tmp_path / "first" / "errors.csv")} == {"", name}
    # One data set is all questions.
    assert len(table(tmp_path / "first" / "f1_under_budget.csv")) == 1


def test_the_overview_is_readable_and_replaces_the_old_one(
    answers: list[Answer], tmp_path: Path
) -> None:
    path = tmp_path / "compare.png"
    path.write_bytes(b"old")
    draw_overview(content(answers), path)
    with Image.open(path) as image:
        assert image.size[0] >= 1200
        # Both systems' colours are on the canvas.
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**24) or []}
    assert {(0x00, 0x72, 0xB2), (0x00, 0x00, 0x00)} <= colours
    assert [child.name for child in tmp_path.iterdir()] == ["compare.png"]


def test_a_failing_picture_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "compare.png"
    path.write_bytes(b"old")

    def endless() -> Figure:
        figure, _ = panels(["one"])
        # Too large a picture fails while it is drawn.
        figure.set_size_inches(1e6, 1)
        return figure

    with pytest.raises(ValueError, match="too large"):
        save(endless, [path])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_equal_scores_are_drawn_although_their_mean_is_rounded(tmp_path: Path) -> None:
    result = content(answers_of([1 / 3] * 7))
    (row,) = result["results"]
    # As far as rounding may go.
    row |= {"f1_low": row["f1"] + 1e-14, "f1_high": row["f1"] - 1e-14}
    draw_overview(result, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").exists()


def test_labels_keep_clear_of_each_other_and_of_points() -> None:
    _, axes = panels(["one"])
    axis = axes["one"]
    points = [(0.1 * (n % 7), 0.07 * (n * n % 11)) for n in range(40)]
    axis.set(xlim=(-0.1, 0.8), ylim=(-0.1, 0.9))
    place_labels(axis, [(x, y, f"{n}/all", "black") for n, (x, y) in enumerate(points)])
    boxes = [text.get_window_extent() for text in axis.texts]
    assert len(boxes) >= 5
    panel = axis.get_window_extent()
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place])
        assert not any(box.contains(*axis.transData.transform(point)) for point in points)
        assert panel.x0 <= box.x0
        assert box.x1 <= panel.x1


@pytest.mark.parametrize("length", [3, 25, 70])
def test_a_legend_stays_within_the_picture(length: int) -> None:
    figure, axes = panels(["one", "two"])
    (line,) = axes["one"].plot([0], [0], label="x" * length)
    legend(figure, [line] * 12)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_every_system_has_a_name_a_colour_and_a_marker_of_its_own() -> None:
    systems = EvalConfig.model_json_schema()["properties"]["systems"]["items"]["enum"]
    assert list(SYSTEM_NAMES) == systems
    for looks in (SYSTEM_NAMES, SYSTEM_COLOURS, SYSTEM_MARKERS):
        assert list(looks) == systems
        assert len(set(looks.values())) == len(systems)
    checkpoints = EvalConfig.model_json_schema()["properties"]["checkpoints"]["items"]["enum"]
    assert list(CHECKPOINT_NAMES) == checkpoints


def test_many_arms_look_different_from_each_other_and_from_their_system() -> None:
    looks = arm_looks({"arm": f"{n}" if n else "", "system": "coinrag"} for n in range(50))
    assert len(set(looks.values())) == 50


def test_a_long_name_keeps_both_ends() -> None:
    assert shortened("isolated") == "isolated"
    assert shortened("a" * 30 + "b" * 30, 11) == "aaaaa…bbbbb"
    assert len(shortened("x" * 99)) == 36
