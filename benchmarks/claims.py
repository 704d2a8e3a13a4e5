"""What the paper claims, beside what was measured here."""

from __future__ import annotations

from typing import Any

import ablation
from harness import pages, runs

SIGNALS = ("wasserstein", "l1", "fpgm", "reconstruction")


def page() -> str:
    """Claims and measurements, as Markdown."""
    return pages.table(
        ["the paper", "here", "holds here"], [*_cifar(), *_ablation(), *_taylor(), *_experts(), *_latency()]
    )


def _cifar() -> list[list[str]]:
    """ResNet-56 with half of its FLOPs, from benchmarks/cifar_resnet56.py."""
    stored = pages.results("cifar_resnet56")["rows"]
    found = {
        (row["rule"], row["signal"], row["repair"]): row["top1"]
        for row in stored
        if (row["depth"], row["keep"]) == (56, 0.5)
    }
    ahead = {
        repair: [s for s in SIGNALS if found["tod", s, repair] > found["uniform", s, repair]]
        for repair in ("plain", "sequential")
    }
    gains = [found["tod", s, "sequential"] - found["uniform", s, "sequential"] for s in SIGNALS]
    plain = {signal: found["tod", signal, "plain"] for signal in SIGNALS}
    worst = min(plain, key=plain.__getitem__)
    best = max(found, key=found.__getitem__)
    return [
        [
            "Whatever the removal signal, ToD is better than a uniform rule at the same budget.",
            f"ResNet-56 with half of its FLOPs, after the cut: ToD is ahead for {len(ahead['plain'])} of"
            f" {len(SIGNALS)} signals. After repair: for {len(ahead['sequential'])}, by {min(gains):.1f} to"
            f" {max(gains):.1f} points. (`cifar_resnet56`)",
            _holds(len(ahead["plain"]) == len(SIGNALS), len(ahead["sequential"]) == len(SIGNALS)),
        ],
        [
            "The Wasserstein score, with ToD, removes the right units.",
            "The same model, after the cut: "
            + ", ".join(f"`{signal}` {top1:.1f} %" for signal, top1 in plain.items())
            + ". (`cifar_resnet56`)",
            _holds(worst != "wasserstein", False),
        ],
        [
            "ToD finds the right width of every layer.",
            f"The best row of the same table is `{best[1]}` with the rule `{best[0]}`, repaired:"
            f" {found[best]:.1f} %; the best with ToD has"
            f" {max(v for (rule, *_), v in found.items() if rule == 'tod'):.1f} %. (`cifar_resnet56`)",
            _holds(best[0] == "tod", False),
        ],
    ]


def _ablation() -> list[list[str]]:
    """The tolerances at which both ways were measured after the cut, from benchmarks/ablation.py."""
    tops: dict[tuple[str, float], dict[str, float]] = {}
    for row in runs.stored("ablation"):
        if row["seed"] == 0 and "top1" in row:
            tops.setdefault((row["net"], row["alpha"]), {})[row["way"]] = row["top1"]
    ours, same_signal = ablation.WAYS[:2]
    both = {key: of_way for key, of_way in tops.items() if {ours, same_signal} <= of_way.keys()}
    if not both:
        return []
    gains = [of_way[ours] - of_way[same_signal] for of_way in both.values()]
    ahead = sum(gain > 0 for gain in gains)
    nets = " and ".join(dict.fromkeys(net for net, _ in both))
    return [
        [
            "With the Wasserstein score, ToD is better than a uniform rule with the same parameters.",
            f"{nets}, after the cut: at {ahead} of {len(gains)} tolerances, by {min(gains):.1f} to"
            f" {max(gains):.1f} points. (`ablation`)",
            _holds(ahead == len(gains), ahead > 0),
        ]
    ]


def _taylor() -> list[list[str]]:
    """How often the second order loses fewer points than the first, from benchmarks/taylor_order.py."""
    drops = {(r["depth"], r["alpha"], r["protection"]): r["drop"] for r in runs.stored("taylor_order")}
    pairs = [
        (drops[depth, alpha, "taylor2"], drop, drops[depth, alpha, "deletion"])
        for (depth, alpha, order), drop in drops.items()
        if order == "taylor" and {(depth, alpha, "taylor2"), (depth, alpha, "deletion")} <= drops.keys()
    ]
    if not pairs:
        return []
    better = sum(second < first for second, first, _ in pairs)
    exact = sum(deletion < min(first, second) for second, first, deletion in pairs)
    return [
        [
            "Second-order protection starts from a better one-shot model than first-order protection.",
            f"CIFAR-10 ResNets, after the cut: it loses fewer points in {better} of {len(pairs)} settings."
            f" Exact deletion loses the fewest in {exact}. (`taylor_order`)",
            _holds(better == len(pairs), better > len(pairs) / 2),
        ]
    ]


def _experts() -> list[list[str]]:
    """The tiny Qwen2-MoE, from benchmarks/moe.py."""
    rows = [row for row in runs.stored("moe") if row["mix"] == "equally much of each domain"]
    means = {
        (row["signal"], row["rule"], round(row["removed"], 2)): sum(row["values"]) / len(row["values"])
        for row in rows
    }
    shares = sorted({removed for _, _, removed in means})
    pairs = {
        removed: (means["soft_activation", "tod", removed], means["soft_activation", "uniform", removed])
        for removed in shares
    }
    text = ", ".join(
        f"{100 * removed:.0f} % removed: {tod:.0f} against {uniform:.0f}"
        for removed, (tod, uniform) in pairs.items()
    )
    better = all(tod < 0.99 * uniform for tod, uniform in pairs.values())
    return [
        [
            "ToD keeps more than uniform expert pruning, the more so the more is removed.",
            f"A small Qwen2-MoE, perplexity with `soft_activation`, ToD against uniform: {text}. (`moe`)",
            _holds(better, any(tod < 0.99 * uniform for tod, uniform in pairs.values())),
        ]
    ]


def _latency() -> list[list[str]]:
    """ResNet-50, from benchmarks/latency.py."""
    rows: list[Any] = [
        (row["format"], found)
        for row in runs.stored("latency")
        for found in row["speed-up"]
        if found["plan"].endswith(" 1")
    ]
    faster = [found["faster"]["median"] for _, found in rows]
    paper = [found["paper"] for _, found in rows]
    return [
        [
            f"ResNet-50 with 47.2 % of its FLOPs is {min(paper)} to {max(paper)} times faster on a CPU.",
            f"{min(faster):.2f} to {max(faster):.2f} times, by batch size and memory format. (`latency`)",
            _holds(min(faster) >= min(paper), max(faster) >= max(paper)),
        ]
    ]


def _holds(fully: bool, partly: bool) -> str:
    return "yes" if fully else "partly" if partly else "no"
