"""The report value, its table and its JSON, the page as a file, and the static figures; the page at work
is in test_report_browser.py.
"""

from __future__ import annotations

import base64
import io
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_spaces import hand_scores, hand_spaces, random_scores
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from zoo import SMALL

import fairpruner as fp
from fairpruner.core.budget import METRICS
from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import UnitSpace
from fairpruner.reporting import Report, report
from fairpruner.reporting.facts import costs_by_space
from fairpruner.reporting.page import payload, render_page
from fairpruner.reporting.plots import (
    draw,
    plot_ablation,
    plot_profile,
    plot_scores,
    plot_tolerance,
    save_figure,
)

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
ASSETS = Path(fp.__file__).parent / "reporting" / "assets"


def printed(value: Report, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(value)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_costs_are_shared_out_as_computed_by_hand() -> None:
    spaces = hand_spaces(
        [4, 6]
    )  # matrices 3×4, 4×6 and 6×10, applied once, twice and three times; half of each goes to each side
    np.testing.assert_allclose(costs_by_space(spaces, spaces.costs.params, {}), [6 + 12, 12 + 30, 6 + 30])
    np.testing.assert_allclose(costs_by_space(spaces, spaces.costs.flops, {}), [6 + 24, 24 + 90, 6 + 90])
    kept = costs_by_space(spaces, spaces.costs.params, {"s0": (1, 2), "s1": (0,)})  # 3×2, 2×5 and 5×10
    np.testing.assert_allclose(kept, [3 + 5, 5 + 25, 3 + 25])


def test_a_concatenated_axis_goes_to_its_spaces_by_what_they_keep() -> None:
    items = (UnitSpace("a", "channel", 2, ()), UnitSpace("b", "channel", 3, ()))
    # two more indices belong to neither
    axis = Factor(7, {"a": np.array([1, 1]), "b": np.array([1, 1, 1])})
    spaces = Spaces(items, {}, CostModel((axis,), (Term(10, (0,)), Term(5, ())), ()), fingerprint="")
    np.testing.assert_allclose(costs_by_space(spaces, spaces.costs.params, {"b": (0, 2)}), [20, 10, 20 + 5])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 2**31 - 1), st.floats(0, 0.999))
def test_columns_add_up_to_the_totals(sizes: list[int], seed: int, alpha: float) -> None:
    scores = random_scores(sizes, seed)
    value = report(scores, fp.allocate(scores, alpha=alpha))
    assert sum(row.size for row in value.spaces) == value.before["units"]
    assert sum(row.kept for row in value.spaces) == value.after["units"]
    for metric in ("params", "flops"):
        before, after = (sum(getattr(row, metric)[i] for row in value.spaces) for i in (0, 1))
        assert before == pytest.approx(value.before[metric], rel=1e-12)
        assert after == pytest.approx(value.after[metric], rel=1e-12)


@pytest.mark.parametrize(
    "name", ["conv_flatten", "grouped", "unet", "split_concat", "shuffle", "resnet8_a", "densenet40"]
)
def test_columns_add_up_for_every_topology(name: str) -> None:
    build, shape = SMALL[name]
    spaces = fp.discover(build().eval(), torch.rand(shape))
    value = Report(name, fp.Plan.removing(spaces, {space.name: range(space.size // 2) for space in spaces}))
    for metric in ("params", "flops"):
        assert sum(getattr(row, metric)[1] for row in value.spaces) == pytest.approx(
            value.after[metric], rel=1e-12
        )


def test_scores_alone_begin_at_a_tenth() -> None:
    scores = random_scores([20, 30], seed=0)
    value = report(scores)
    assert value.plan.alpha == 0.1
    assert value.plan.removed == fp.allocate(scores, alpha=0.1).removed


def test_files_and_folders_are_as_good_as_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    scores = fp.score(model, [(torch.randn(24, 4), torch.arange(24) % 3)], removal="l1")
    plan = fp.allocate(scores, alpha=0.25)
    scores.save(tmp_path / "scores.safetensors")
    plan.save(tmp_path / "plan.json")
    fp.save(fp.cut(model, plan), plan, tmp_path / "small")
    value = report(scores, plan, title="mlp").to_json()
    for place in (tmp_path / "plan.json", str(tmp_path / "small"), plan):
        assert report(tmp_path / "scores.safetensors", place, title="mlp").to_json() == value
    assert report(tmp_path / "scores.safetensors").title == "scores.safetensors"
    folder = report(tmp_path / "small", measured={"original": {"params": 67}})
    assert folder.to_json()["spaces"] == value["spaces"]
    assert folder.diagnosis is None
    assert folder.measured == {"small": {"params": plan.predicted["params"]}, "original": {"params": 67}}


def test_json_is_plain_and_complete() -> None:
    scores = random_scores([12, 9], seed=3)
    value = report(scores, measured={"cut": {"accuracy": np.float32(0.5), "flops": np.int64(10)}})
    content = json.loads(json.dumps(value.to_json(), allow_nan=False))
    assert content["format"] == "fairpruner report"
    assert content["predicted"] == dict(value.plan.predicted)
    assert content["share"]["units"] == pytest.approx(value.after["units"] / 21)
    assert [row["space"] for row in content["spaces"]] == ["s0", "s1", "(outside all spaces)"]
    assert content["measured"] == {"cut": {"accuracy": 0.5, "flops": 10}}
    assert content["signals"] == {"samples": 8, "removal": "u", "protection": "r"}
    assert len(content["diagnosis"]["spaces"]) == 2


def test_the_table_says_it_all() -> None:
    spaces = Spaces(
        (UnitSpace("conv", "channel", 4, ()),),
        {"head": "reaches the model's output"},
        CostModel((), (Term(1234, ()),), ()),
        fingerprint="",
    )
    value = Report(
        "net",
        fp.Plan.removing(spaces, {"conv": (2,)}),
        measured={"cut": {"accuracy": 0.91, "latency_ms": 3.25}, "original": {"accuracy": 0.93}},
    )
    text = printed(value)
    for part in (
        "net: given keeps 75.0% of units",
        "1,234 → 1,234",
        "Left out head: reaches the model's output",
        "latency_ms",
        "3.25",
        "–",
    ):
        assert part in text, part
    rows = [line.split() for line in text.splitlines()]
    assert ["conv", "channel", "4", "3", "0", "→", "0", "0", "→", "0"] in rows
    assert ["original", "0.93", "–"] in rows
    halved = Report("net", fp.Plan.removing(hand_spaces([3, 5]), {}))  # 3×3, 3×5 and 5×10
    assert "12 → 12" in printed(halved)
    assert "32.5 → 32.5" in printed(halved)
    assert "tod at tolerance 0.1" in printed(report(random_scores([5], seed=0)))


def test_a_predicted_latency_appears_where_a_plan_has_one() -> None:
    spaces = hand_spaces([4])
    plain = fp.Plan.removing(spaces, {"s0": (0,)})
    plan = fp.Plan(
        spaces,
        plain.removed,
        None,
        "given",
        False,
        {**plain.predicted, "latency_ms": 3},
        {**plain.original, "latency_ms": 4},
    )
    rows = [line.split() for line in printed(Report("net", plan)).splitlines()]
    assert ["latency_ms", "4", "3", "75.0%"] in rows


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "fast", None, True])
def test_measured_must_be_finite_numbers(value: object) -> None:
    with pytest.raises(
        fp.FairprunerError, match=r"measured 'accuracy' of 'cut' is .*, expected a finite number"
    ):
        report(random_scores([4], seed=0), measured={"cut": {"accuracy": value}})  # type: ignore[dict-item]


def test_mistakes_get_one_sentence(tmp_path: Path) -> None:
    scores = random_scores([4, 5], seed=0)
    with pytest.raises(fp.FairprunerError, match="belong to different models"):
        report(scores, fp.allocate(random_scores([4, 6], seed=0), alpha=0.1))
    with pytest.raises(fp.FairprunerError, match="Cannot read"):
        report(tmp_path / "nothing.safetensors")
    with pytest.raises(fp.FairprunerError, match=r"Cannot read .*plan\.json"):
        report(tmp_path)
    with pytest.raises(fp.FairprunerError, match="already holds a plan"):
        report(tmp_path, fp.allocate(scores, alpha=0.1))
    (tmp_path / "file").touch()
    with pytest.raises(fp.FairprunerError, match="is not a complete JSON file"):
        report(scores, measured=tmp_path / "file")
    (tmp_path / "list.json").write_text("[0.91]")
    with pytest.raises(fp.FairprunerError, match="expected numbers by model"):
        report(scores, measured=tmp_path / "list.json")
    with pytest.raises(fp.FairprunerError, match="Cannot write"):
        report(scores).save_html(tmp_path / "file" / "report.html")


def test_arguments_of_a_wrong_type_are_refused() -> None:
    scores = random_scores([4], seed=0)
    wrong: dict[str, dict[str, Any]] = {
        "The source of a report is a NoneType, expected scores": {"source": None},
        "The source of a report is a Plan": {"source": fp.allocate(scores, alpha=0.1)},
        "The plan of a report is a int": {"source": scores, "plan": 3},
        "The latency table of a report is a int": {"source": scores, "latency": 3},
        "The title of a report is a int, expected text": {"source": scores, "title": 3},
    }
    for message, arguments in wrong.items():
        with pytest.raises(fp.FairprunerError, match=message):
            report(**arguments)


def test_a_measurement_is_taken_as_it_is() -> None:
    found = fp.measure(torch.nn.Linear(3, 2), torch.zeros(1, 3), batch_sizes=[1], repeats=1, memory=False)
    assert report(random_scores([4], seed=0), measured=found).measured == found.numbers()


def test_a_title_that_utf8_cannot_hold_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(fp.FairprunerError, match="which UTF-8 cannot hold: give another title"):
        report(random_scores([4], seed=0), title="a\udcff").save_html(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    report(random_scores([4, 5], seed=0), title="<b> & co").save_html(tmp_path / "new" / "report.html")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]
    text = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert "<title>&lt;b&gt; &amp; co · fairpruner</title>" in text
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)""", text) == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "<!--" not in text
    assert text == render_page(report(random_scores([4, 5], seed=0), title="<b> & co"))


def test_the_page_holds_exact_rankings() -> None:
    rng = np.random.default_rng(0)
    removal, protection = rng.integers(0, 5, 40).astype(float), rng.random(40)
    scores = hand_scores([removal], [protection])
    content = payload(report(scores))
    packed = content["scored"][0]
    assert (
        np.frombuffer(base64.b64decode(packed["order"]), "<i4").tolist()
        == np.argsort(removal, kind="stable").tolist()
    )
    assert [0, *np.cumsum([int(step) for step in packed["steps"]])] == fp.conflict_curve(
        removal, protection
    ).overlaps.tolist()
    assert packed["same"] is None
    assert content["given"] is None
    assert content["file"] == {"format": "fairpruner plan", "version": 1}


def contrast(first: str, second: str) -> float:
    """WCAG's contrast of two colours #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_read_in_both_themes() -> None:
    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    blocks = [
        dict(re.findall(r"--([\w-]+): (#\w{6});", block))
        for block in re.findall(r":root[^{]*\{([^}]*--page[^}]*)\}", style)
    ]
    assert len(blocks) == 2  # light and dark
    for theme in blocks:
        for ground in ("page", "card"):
            assert min(contrast(theme[name], theme[ground]) for name in ("text", "soft", "a", "b")) >= 4.5
        assert contrast(theme["c"], theme["card"]) >= 3
        assert contrast(theme["on-a"], theme["a"]) >= 4.5


def test_what_is_vendored_comes_with_its_licence() -> None:
    assert "MIT License" in (ASSETS / "uPlot.LICENSE").read_text(encoding="utf-8")
    assert max(path.stat().st_size for path in ASSETS.iterdir()) < 100_000


@needs_matplotlib
def test_figures_show_the_numbers(tmp_path: Path) -> None:
    scores = random_scores([20, 30, 12], seed=0)
    left, right, *_ = plot_scores(scores).axes
    assert (left.get_title(), right.get_title()) == ("s0: u", "s0: r")
    assert left.patches[0].get_data().values.tolist() == sorted(scores.removal["s0"])
    assert [axes.get_title() for axes in plot_scores(scores, ["s1"]).axes] == ["s1: u", "s1: r"]

    plan = fp.allocate(scores, alpha=0.3)
    profile = plot_profile(plan).axes[0]
    assert [bar.get_height() for bar in profile.patches[:3]] == [
        (space.size - plan.depths[space.name]) / space.size for space in scores.spaces
    ]
    assert profile.lines[0].get_ydata()[0] == plan.share("units")

    for line, metric in zip(plot_tolerance(scores).axes[0].lines, METRICS, strict=True):
        tolerances, removed = line.get_xdata(), line.get_ydata()
        assert (np.diff(removed) >= 0).all()
        assert removed[30] == 1 - fp.allocate(scores, alpha=float(tolerances[30])).share(metric)

    ablation = plot_ablation({"random": [(0.3, 0.4, 0.6), (0.1, 0.8, 0.8)]}).axes[0]
    assert ablation.lines[0].get_xdata().tolist() == [0.1, 0.3]
    assert ablation.lines[0].get_ydata().tolist() == [0.8, 0.5]
    assert ablation.collections[0].get_paths()[0].vertices[:, 1].min() == pytest.approx(0.4)

    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        save_figure(plot_tolerance(scores), tmp_path / f"figure{ending}")
        assert (tmp_path / f"figure{ending}").read_bytes().startswith(start)


@needs_matplotlib
def test_figures_are_drawn_from_files(tmp_path: Path) -> None:
    scores = random_scores([20, 30], seed=0)
    scores.save(tmp_path / "scores.safetensors")
    fp.allocate(scores, alpha=0.2).save(tmp_path / "plan.json")
    (tmp_path / "ablation.json").write_text('{"ToD": [[0.1, 0.9], [0.3, 0.8]]}')
    for name, source in (
        ("scores", "scores.safetensors"),
        ("tolerance", "scores.safetensors"),
        ("profile", "plan.json"),
        ("profile", ""),
        ("ablation", "ablation.json"),
    ):
        draw(name, tmp_path / source, tmp_path / f"{name}.svg")
        assert "</svg>" in (tmp_path / f"{name}.svg").read_text()
        (tmp_path / f"{name}.svg").unlink()
    with pytest.raises(fp.FairprunerError, match="Unknown figure 'profiles': did you mean 'profile'"):
        draw("profiles", tmp_path / "plan.json", tmp_path / "x.svg")


@needs_matplotlib
def test_figures_refuse_what_they_cannot_draw(tmp_path: Path) -> None:
    with pytest.raises(fp.FairprunerError, match=r"cannot be written as '\.gif'"):
        save_figure(plot_profile(fp.Plan.removing(hand_spaces([4]), {})), tmp_path / "figure.gif")
    with pytest.raises(fp.FairprunerError, match="Curve 'random' needs points"):
        plot_ablation({"random": [(0.3,)]})
    with pytest.raises(fp.FairprunerError, match="Unknown space"):
        plot_scores(random_scores([4], seed=0), ["s7"])
