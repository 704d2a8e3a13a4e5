"""The option to renormalise the router weights of a model that lost experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fairpruner as fp

transformers = pytest.importorskip("transformers")


def model() -> Any:
    config = transformers.Qwen2MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        norm_topk_prob=False,
    )
    return transformers.Qwen2MoeForCausalLM(config).eval()


def test_router_weights_sum_to_one_and_the_setting_is_saved(tmp_path: Path) -> None:
    full = model()
    tokens = {"input_ids": torch.arange(24).view(2, 12) % 9}
    spaces = fp.discover(full, tokens, kinds=["expert"])
    plan = fp.Plan.removing(spaces, {spaces[0].name: [0, 4]})
    small = fp.cut(full, plan)

    # A loss that falls with the size of the logits' change: the setting is kept only if the loss allows it.
    def farther(output: Any, labels: Any) -> torch.Tensor:
        return -(output.logits - before).abs().mean()

    before = small(**tokens).logits
    repaired, notes = fp.repair_with_notes(small, full, plan, [tokens], method="renormalise", loss=farther)
    assert {note.outcome for note in notes} == {"repaired"}
    routed: list[torch.Tensor] = []
    router = next(m for m in repaired.modules() if getattr(m, "norm_topk_prob", False))
    router.register_forward_hook(lambda module, args, output: routed.append(output[1]))
    logits = repaired(**tokens).logits
    torch.testing.assert_close(routed[0].sum(-1), torch.ones(24))
    assert small.config.norm_topk_prob is False
    fp.save(repaired, plan, tmp_path / "small")
    assert json.loads((tmp_path / "small" / "config.json").read_text())["norm_topk_prob"] is True
    assert torch.equal(fp.load(tmp_path / "small")(**tokens).logits, logits)

    def nearer(output: Any, labels: Any) -> torch.Tensor:
        return -farther(output, labels)

    kept, notes = fp.repair_with_notes(small, full, plan, [tokens], method="renormalise", loss=nearer)
    assert [note.outcome for note in notes] == ["kept"]
    assert kept.config.norm_topk_prob is False
