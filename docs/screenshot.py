"""Make docs/images/report.png: the report page of a CIFAR-10 ResNet-56, as chromium shows it.

python docs/screenshot.py --shared ../shared    # needs playwright, chromium, and the benchmarks' weights

Accuracies on the page are those in benchmarks/results/cifar_resnet56.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import fairpruner as fp

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from nets.images import cifar10, some  # noqa: E402
from nets.training import resnet  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "report.png"
SAMPLES = 1000


def write_report(shared: Path, path: Path) -> None:
    """Score ResNet-56 once and write its report page, with the plan for half the FLOPs first."""
    model = resnet(56, shared)
    data = some(cifar10("train10k", shared), SAMPLES)
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])  # the channels inside blocks
    scores = fp.score(model, data, spaces=spaces)
    plan = fp.allocate(scores, keep=fp.Budget("flops", 0.5))
    fp.report(scores, plan, measured=measured(plan), title="ResNet-56 on CIFAR-10").save_html(path)


def measured(plan: fp.Plan) -> dict[str, dict[str, float]]:
    """The accuracy of the original, the cut and the repaired model, from the benchmark's results."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "cifar_resnet56.json").read_text())["rows"]
    found = {}
    for row in rows:
        if (row["depth"], row["rule"], row["signal"]) != (56, "tod", "wasserstein"):
            continue
        flops = row["flops_kept"] * plan.original["flops"]
        found["original"] = {"accuracy": row["baseline"] / 100, "flops": plan.original["flops"]}
        if row["repair"] in ("plain", "sequential"):
            name = {"plain": "cut", "sequential": "repaired"}[row["repair"]]
            found[f"{name}, {row['keep']:.0%} of the FLOPs"] = {"accuracy": row["top1"] / 100, "flops": flops}
    return found


def shoot(page: Path, picture: Path) -> None:
    """A picture of the top of the page, 1200 pixels wide."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": 1200, "height": 706}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_timeout(1000)  # until charts are drawn
        tab.screenshot(path=picture)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="the benchmarks' data folder")
    shared = parser.parse_args().shared
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_report(shared, page)
        PICTURE.parent.mkdir(exist_ok=True)
        shoot(page, PICTURE)


if __name__ == "__main__":
    main()
