"""Write a report page on which any plan can be chosen, and the same facts as a table, JSON and figures.

python examples/report.py
"""

from __future__ import annotations

import json

import torch
from rich import print as rich_print
from torch import nn

import fairpruner as fp
from fairpruner.reporting.plots import plot_tolerance, save_figure


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)).eval()
    data = [(torch.randn(64, 16), torch.arange(64) % 4) for _ in range(4)]
    scores = fp.score(model, data)

    def agreement(small: nn.Module) -> float:
        """The share of inputs for which a smaller model predicts the same class as the original."""
        with torch.no_grad():
            return float(
                torch.cat([small(x).argmax(1) == model(x).argmax(1) for x, _ in data]).double().mean()
            )

    # One row of numbers per model. The page draws "accuracy" against "flops", and against "latency_ms" if
    # that was measured.
    plans = fp.sweep(scores, "flops", [0.9, 0.7, 0.5, 0.3])
    measured = {
        f"{plan.share('flops'):.0%} kept": {"accuracy": agreement(fp.cut(model, plan)), **plan.predicted}
        for plan in plans
    }

    report = fp.report(scores, plans[2], measured=measured, title="A small perceptron")
    report.save_html("report.html")
    rich_print(report)
    print(json.dumps(report.to_json()["share"]))
    save_figure(plot_tolerance(scores), "tolerance.svg")


if __name__ == "__main__":
    main()
