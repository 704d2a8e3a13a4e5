"""The report's page in a real browser: it answers as Python does, saves plans that cut, and reads well
everywhere.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_spaces import random_scores

import fairpruner as fp
from fairpruner.core.budget import METRICS
from fairpruner.core.cost_model import Term
from fairpruner.core.latency import LatencyTable, TimedOp
from fairpruner.core.scores import Scores
from fairpruner.demo import build
from fairpruner.reporting import report

CHROMIUM = shutil.which("chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("there is no chromium here", allow_module_level=True)

pytestmark = pytest.mark.slow  # starts a browser

ARGUMENTS = [
    f"--{argument}"
    for argument in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
]
LAPTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Write a report, open it, and hold the page to saying nothing on its console and asking nothing of
    the network.
    """
    contexts, noise, asked = [], [], []
    number = itertools.count()

    def opened(value: Any, **context: Any) -> Any:
        path = tmp_path / f"report{next(number)}.html"
        value.save_html(path)
        contexts.append(browser.new_context(**{**LAPTOP, "accept_downloads": True, **context}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        settle(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert noise == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked)


def settle(page: Any) -> None:
    """Until the frame after the next has been drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def choose(page: Any, mode: str, amount: float) -> None:
    page.check(f"input[name=mode][value={mode}]", force=True)
    page.fill("#amount", repr(amount))
    page.press("#amount", "Enter")
    settle(page)


def shown(page: Any) -> tuple[dict[str, int], dict[str, int], float]:
    """Kept of each metric, units kept of each space, and the tolerance, as the page says."""
    kept = {metric: int(page.locator(f"#kept-{metric}").get_attribute("data-value")) for metric in METRICS}
    rows = page.eval_on_selector_all(
        "#table tbody tr", "rows => rows.map((row) => [row.dataset.space, Number(row.dataset.kept)])"
    )
    return kept, dict(rows), float(page.locator("#kept-alpha").get_attribute("data-value"))


def expected(plan: fp.Plan) -> tuple[dict[str, int], dict[str, int], float]:
    assert plan.alpha is not None
    return (
        {metric: int(plan.predicted[metric]) for metric in METRICS},
        {space.name: space.size - plan.depths[space.name] for space in plan.spaces},
        plan.alpha,
    )


def download(page: Any, path: Path) -> Path:
    with page.expect_download() as started:
        page.click("#save")
    assert started.value.suggested_filename == "plan.json"
    started.value.save_as(path)
    return path


@pytest.fixture(scope="module")
def digits() -> tuple[torch.nn.Module, Scores]:
    torch.manual_seed(0)
    model = build().eval()
    return model, fp.score(
        model,
        [(torch.rand(32, 1, 8, 8), torch.arange(32) % 10) for _ in range(2)],
        removal=["wasserstein", "l1"],
    )


@pytest.mark.parametrize(("kind", "settings"), [("digits", 50), ("ragged", 20), ("ties", 20)])
def test_random_settings_answer_as_python_does(
    open_page: Open, digits: tuple[torch.nn.Module, Scores], kind: str, settings: int
) -> None:
    rng = np.random.default_rng(7)
    ragged = {"s0": rng.integers(1, 5, 17).tolist(), "s2": rng.integers(1, 4, 40).tolist()}
    scores = {
        "digits": lambda: digits[1].using("l1"),
        "ragged": lambda: random_scores([17, 64, 40, 3], seed=1, noise=2.0, min_keep=2, owned=ragged),
        "ties": lambda: random_scores([50, 50, 7], seed=2, levels=4),
    }[kind]()
    page = open_page(report(scores))
    for setting in range(settings):
        multiple_of = [1, 1, 2, 4][rng.integers(4)]
        page.select_option("#multiple", str(multiple_of))
        mode = ["alpha", *METRICS][setting % 4]
        if mode == "alpha":
            amount = float(rng.integers(1000)) / 1000
            plan = fp.allocate(scores, alpha=amount, multiple_of=multiple_of)
        else:
            reach = fp.allocate(scores, alpha=1 - 1e-16, multiple_of=multiple_of).share(mode)
            amount = float(rng.uniform(reach, 1))
            plan = fp.allocate(scores, keep=fp.Budget(mode, amount), multiple_of=multiple_of)
        choose(page, mode, amount)
        assert shown(page) == expected(plan), (mode, amount, multiple_of)


@pytest.mark.parametrize("uneven", [0.0, 2.0])
def test_predicted_latency_follows_the_slider_as_in_python(
    open_page: Open, tmp_path: Path, uneven: float
) -> None:
    rng = np.random.default_rng(11)
    scores = random_scores([17, 64, 40, 3], seed=1, noise=2.0, owned={"s0": rng.integers(1, 5, 17).tolist()})
    costs = scores.spaces.costs
    ops = tuple(
        TimedOp(term.factors, *rng.random(2).tolist(), uneven * rng.random(), tuple(rng.random(2).tolist()))
        for term in costs.flops
    )
    table = LatencyTable(
        costs.factors,
        ops,
        1.1 * sum(op.fixed + op.work + sum(op.widths) for op in ops),
        8,
        scores.spaces.fingerprint,
    )
    page = open_page(report(scores, latency=table))

    def latency() -> float:
        return float(page.locator("#kept-latency_ms").get_attribute("data-value"))

    for setting in range(24):
        multiple_of = [1, 1, 4, 8][rng.integers(4)]
        page.select_option("#multiple", str(multiple_of))
        plans = [
            fp.allocate(scores, alpha=a, multiple_of=multiple_of, latency=table)
            for a in np.linspace(0, 0.999, 40)
        ]
        if setting % 3 == 0:
            mode, amount = "alpha", float(rng.integers(1000)) / 1000
            plan = fp.allocate(scores, alpha=amount, multiple_of=multiple_of, latency=table)
        else:
            mode, amount = "latency_ms", float(rng.uniform(min(p.share("latency_ms") for p in plans), 1))
            plan = fp.allocate(
                scores, keep=fp.Budget("latency", amount), multiple_of=multiple_of, latency=table
            )
        choose(page, mode, amount)
        assert shown(page)[1:] == expected(plan)[1:], (mode, amount, multiple_of)
        assert latency() == plan.predicted["latency_ms"]
    content = json.loads(download(page, tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert content["predicted"] == dict(plan.predicted)
    choose(page, "latency_ms", 0.001)
    assert "Out of reach" in page.inner_text("#message")
    assert page.inner_text("#slider-label") == "Latency kept"


def test_without_a_table_there_is_no_latency_to_choose(open_page: Open) -> None:
    page = open_page(report(random_scores([8, 9], seed=0)))
    assert page.locator("input[value=latency_ms]").count() == 0
    assert page.locator("#kept-latency_ms").count() == 0


def test_budgets_halfway_between_plans_and_plans_of_equal_cost(open_page: Open) -> None:
    scores = random_scores([6, 9, 5], seed=4)
    free = replace(
        scores.spaces.costs, flops=(Term(7, (1,)),)
    )  # only the first space has FLOPs, so many plans cost the same
    scores = replace(scores, spaces=replace(scores.spaces, costs=free))
    page = open_page(report(scores))
    for metric in ("units", "flops"):
        plans = fp.sweep(
            scores,
            metric,
            range(fp.allocate(scores, alpha=1 - 1e-16).predicted[metric], scores_total(scores, metric) + 1),
        )
        reached = sorted({plan.predicted[metric] for plan in plans})
        for amount in {*reached, *((low + high) / 2 for low, high in itertools.pairwise(reached))}:
            share = amount / scores_total(scores, metric)
            choose(page, metric, share)
            assert shown(page) == expected(fp.allocate(scores, keep=fp.Budget(metric, share))), (
                metric,
                amount,
            )


def scores_total(scores: Scores, metric: str) -> int:
    return fp.Plan.removing(scores.spaces, {}).original[metric]


def test_numbers_of_the_charts_are_those_of_the_diagnosis(
    open_page: Open, digits: tuple[torch.nn.Module, Scores]
) -> None:
    scores = digits[1]
    value = report(scores, fp.allocate(scores, alpha=0.2))
    assert value.diagnosis is not None
    page = open_page(value)
    of_page = page.evaluate("""() => page.plan.depths.map((m, s) => {
            const r = page.plan.rankings[s];
            return [r.tod[m], r.mass[m], massBound(r, m, Math.max(page.plan.alpha, r.tod[m])), m && r.same[m] / m];
        })""")
    of_python = [[row.tod, row.mass, row.bound, row.removed_overlap or 0] for row in value.diagnosis.spaces]
    np.testing.assert_allclose(of_page, of_python, rtol=1e-5, atol=1e-9)
    shares = page.evaluate("() => rowsOf(page.plan).map((row) => row.slice(2))")
    np.testing.assert_allclose(shares, [[*row.params, *row.flops] for row in value.spaces[:-1]], rtol=1e-12)


def test_dragging_the_slider_saves_a_plan_that_cuts_a_real_model(
    open_page: Open, digits: tuple[torch.nn.Module, Scores], tmp_path: Path
) -> None:
    model, scores = digits
    page = open_page(report(scores))
    page.check("input[name=mode][value=flops]", force=True)
    box = page.locator("#slider").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    page.mouse.down()
    seen = []
    for part in np.linspace(0.95, 0.4, 12):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + box["height"] / 2)
        settle(page)
        seen.append(shown(page)[0]["flops"])
    page.mouse.up()
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 6

    share = float(page.input_value("#slider"))
    assert 0.3 < share < 0.8
    plan = fp.Plan.load(download(page, tmp_path / "plan.json"))
    asked = fp.allocate(scores, keep=fp.Budget("flops", share))
    assert (plan.removed, plan.alpha, plan.rule, plan.exact) == (asked.removed, asked.alpha, "tod", False)
    assert expected(plan) == shown(page)
    small = fp.cut(model, plan)
    assert fp.count_params(small) == plan.predicted["params"]
    assert fp.count_flops(small, torch.rand(1, 1, 8, 8)) == plan.predicted["flops"]


def test_a_plan_that_is_no_prefix_is_shown_and_saved_as_given(
    open_page: Open, digits: tuple[torch.nn.Module, Scores], tmp_path: Path
) -> None:
    scores = digits[1]
    plan = fp.shuffled(fp.allocate(scores, alpha=0.3), seed=3)
    page = open_page(report(scores, plan))
    assert shown(page)[:2] == expected(plan)[:2]
    assert fp.Plan.load(download(page, tmp_path / "given.json")).removed == plan.removed
    choose(page, "alpha", 0.05)
    assert shown(page) == expected(fp.allocate(scores, alpha=0.05))
    page.click("#reset")
    settle(page)
    assert shown(page)[:2] == expected(plan)[:2]


def test_out_of_reach_is_said_and_nothing_changes(open_page: Open) -> None:
    scores = random_scores([20, 30], seed=0, min_keep=10)
    page = open_page(report(scores))
    choose(page, "params", 0.9)
    before = shown(page)
    choose(page, "params", 0.01)
    smallest = fp.allocate(scores, alpha=1 - 1e-16).share("params")
    assert f"{np.ceil(1000 * smallest) / 10:.1f}" in page.inner_text("#message")
    assert page.get_attribute("#amount", "aria-invalid") == "true"
    choose(page, "alpha", 1.0)
    assert "[0, 1)" in page.inner_text("#message")
    assert shown(page) == before
    choose(page, "alpha", 0.5)
    assert page.inner_text("#message") == ""


def test_all_of_it_works_from_the_keyboard(open_page: Open) -> None:
    scores = random_scores([20, 30, 40], seed=0)
    page = open_page(report(scores, fp.allocate(scores, alpha=0.3)))
    names: list[str] = []
    while names.count("skip") < 2:  # once round
        page.keyboard.press("Tab")
        names.append(
            page.evaluate(
                "() => document.activeElement.id || document.activeElement.name ||"
                " document.activeElement.className"
            )
        )
        if names[-1] == "slider":
            page.keyboard.press("ArrowRight")
            settle(page)
            assert shown(page) == expected(fp.allocate(scores, alpha=0.301))
        if names[-1] == "profile":
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            settle(page)
            assert "s2 keeps" in page.get_attribute("#profile", "aria-label")
    assert {
        "skip",
        "theme",
        "mode",
        "slider",
        "amount",
        "multiple",
        "save",
        "reset",
        "profile",
        "space",
        "scroll",
    } <= set(names)
    page.focus("input[name=mode][value=alpha]")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#slider-label") == "Units kept"
    page.focus("#table tbody tr:nth-child(2) button")
    page.keyboard.press("Enter")
    settle(page)
    assert page.input_value("#space") == "1"


@pytest.mark.parametrize(
    "context", [LAPTOP, {**LAPTOP, "color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"]
)
def test_nothing_overflows_and_every_chart_is_drawn(
    open_page: Open, digits: tuple[torch.nn.Module, Scores], context: dict[str, Any]
) -> None:
    measured = {
        "original": {"accuracy": 0.97, "flops": 3e6, "latency_ms": 4.0},
        "cut": {"accuracy": 0.95, "flops": 1.5e6, "latency_ms": 2.5},
    }
    page = open_page(report(digits[1], measured=measured), **context)
    assert page.evaluate("() => document.scrollingElement.scrollWidth") <= context["viewport"]["width"]
    colours = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => {
            const canvas = plot.querySelector("canvas"), pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const inked = new Set();
            for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) inked.add(pixels.slice(i, i + 3).join());
            return [plot.id, inked.size];
        }))"""
    )
    assert set(colours) == {
        "profile",
        "conflict",
        "tolerance",
        "removal",
        "protection",
        "stability",
        "mass",
        "by-flops",
        "by-latency",
    }
    assert min(colours.values()) > 3
    page_colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, page_colour[4:-1].split(","))) < 200) == (context.get("color_scheme") == "dark")
    if context is LAPTOP:
        page.click("#theme")
        page.click("#theme")
        assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != page_colour
        assert len(page.pdf()) > 20_000


def test_a_folder_shows_its_plan_and_offers_no_choice(
    open_page: Open, digits: tuple[torch.nn.Module, Scores], tmp_path: Path
) -> None:
    model, scores = digits
    plan = fp.allocate(scores, alpha=0.2)
    fp.save(fp.cut(model, plan), plan, tmp_path / "pruned")
    page = open_page(report(tmp_path / "pruned"))
    assert page.locator("#slider").count() == 0
    assert page.locator("#conflict").count() == 0
    assert (
        dict(
            page.eval_on_selector_all(
                "#table tbody tr", "rows => rows.map((row) => [row.dataset.space, Number(row.dataset.kept)])"
            )
        )
        == expected(plan)[1]
    )
    assert fp.Plan.load(download(page, tmp_path / "again.json")).removed == plan.removed
    page.click("#table tbody tr:nth-child(3) button")
    settle(page)
    assert list(plan.removed)[2] in page.inner_text("#profile + figcaption")
    assert f"{plan.predicted['params']:,}" in page.inner_text("#measured")


def test_names_cannot_break_out_of_the_page(open_page: Open) -> None:
    nasty = "</script><script>console.log('in')</script><!-- data -->"
    scores = random_scores([5, 6], seed=0)
    page = open_page(report(scores, title=nasty, measured={nasty: {"accuracy": 0.5, "flops": 1.0}}))
    assert page.inner_text("h1") == nasty
    assert nasty in page.inner_text("#measured")


@pytest.mark.parametrize("kind", ["resnet50", "experts"])
def test_opens_in_two_seconds_and_is_small(browser: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "report.html"
    report(
        resnet50_scores() if kind == "resnet50" else random_scores([60] * 24, seed=0, min_keep=4)
    ).save_html(path)
    assert path.stat().st_size < 8_000_000
    page = browser.new_page()
    seconds = []
    for _ in range(3):  # a busy machine may slow down one of them
        start = time.perf_counter()
        page.goto(path.as_uri())
        settle(page)
        seconds.append(time.perf_counter() - start)
        assert page.locator("#table tbody tr").count() == {"resnet50": 37, "experts": 24}[kind]
    page.close()
    assert min(seconds) < 2, seconds


def resnet50_scores() -> Scores:
    """ResNet-50's own spaces with made-up scores: a page's weight does not depend on their meaning."""
    models = pytest.importorskip("torchvision.models")
    spaces = fp.discover(models.resnet50().eval(), torch.rand(1, 3, 64, 64))
    rng = np.random.default_rng(0)
    removal = {space.name: rng.random(space.size) for space in spaces}
    protection = {name: values + rng.random(values.size) for name, values in removal.items()}
    halves = {
        signal: {
            name: np.stack([values, values + rng.random(values.size)]) for name, values in removal.items()
        }
        for signal in ("u", "r")
    }
    return Scores(spaces, {"u": removal}, {"r": protection}, samples=1000, halves=halves)


def test_the_saved_plan_is_readable_json(open_page: Open, tmp_path: Path) -> None:
    scores = random_scores([8, 9], seed=0)
    page = open_page(report(scores))
    choose(page, "units", 0.8)
    content = json.loads(download(page, tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert list(content)[:2] == ["format", "version"]
    assert "digest" not in content
    assert content["predicted"] == dict(fp.allocate(scores, keep=fp.Budget("units", 0.8)).predicted)
