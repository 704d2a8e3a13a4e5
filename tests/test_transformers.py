"""Heads and hidden units of the transformers people have: found, cut right in float64, costed exactly."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from checks import check_cut, difference, doubled, some_units, with_lively_weights
from transformers_zoo import HUGGING_FACE, TIMM, WITHOUT_HEADS, hugging_face

import fairpruner as fp


@pytest.mark.slow
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_hugging_face(family: str) -> None:
    model, example = with_lively_weights(hugging_face(family)), HUGGING_FACE[family][3]()
    spaces = fp.discover(model, example)
    assert {"head", "hidden"} <= {s.kind for s in spaces}
    blocks = 2 * (2 if family == "clip" else 1)
    assert sum(s.kind == "hidden" and s.size in (48, 128) for s in spaces) == (
        4 if family == "t5" else blocks
    )
    for seed, share in enumerate((0.3, 0.8)):
        check_cut(model, example, spaces, some_units(spaces, share, seed))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_a_head_unit_is_a_key_value_group(family: str) -> None:
    spaces = fp.discover(hugging_face(family), HUGGING_FACE[family][3]())
    heads = [s for s in spaces if s.kind == "head"]
    assert [s.size for s in heads] == [2, 2]
    rows = {s.tensor.split(".")[-2]: (s.owner >= 0).sum() for s in heads[0].slices if s.role == "write"}
    assert rows == {"q_proj": 32, "k_proj": 16, "v_proj": 16}


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_heads_that_share_keys_are_cut_right_with_and_without_padding(
    family: str, keys: int, tmp_path: Path
) -> None:
    """Without padding, attention shares keys by itself; with it, their number is in an attribute."""
    base = hugging_face(family)
    config = copy.deepcopy(base.config)
    config.num_key_value_heads, config.initializer_range = keys, 0.5
    model = type(base)(config).double().eval()
    spaces = fp.discover(model, HUGGING_FACE[family][3]())
    heads = [s for s in spaces if s.kind == "head"]
    assert [s.size for s in heads] == [{1: 4, 2: 2}[keys]] * 2
    plan = fp.Plan.removing(spaces, {space.name: [0] for space in heads})
    small, masked = fp.cut(model, plan), fp.mask(model, plan)
    fp.save(small, plan, tmp_path / "small")
    loaded = fp.load(tmp_path / "small", build=lambda: type(base)(config).double())
    whole = torch.ones(2, 9, dtype=torch.long)
    left, right = whole.clone(), whole.clone()
    left[0, :3], right[0, -3:] = 0, 0
    for mask in (None, whole, left, right):
        text = {"input_ids": torch.randint(3, 90, (2, 9)), "attention_mask": mask}
        for cut in (small, loaded):
            assert difference(cut, masked, text) < (1e-6 if family == "gemma" else 1e-9)  # float32 norms


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    options, size = TIMM[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = with_lively_weights(timm.create_model(name, **options))
    example = torch.randn(1, 3, size, size, dtype=torch.float64)
    if (
        name == "convnextv2_atto"
        # its global response norm divides by a mean over all hidden units: removing one changes the
        # others
    ):
        with pytest.raises(fp.FairprunerError, match="nothing to prune"):
            fp.discover(model, example)
        return
    spaces = fp.discover(model, example)
    kinds = {s.kind for s in spaces}
    assert "hidden" in kinds or "channel" in kinds
    assert ("head" in kinds) == (name not in WITHOUT_HEADS)
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


@pytest.mark.parametrize("name", ["VisionTransformer", "SwinTransformer"])
def test_torchvision_transformers(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    arguments, size = {
        "VisionTransformer": ((32, 8, 2, 4, 32, 64), 32),
        "SwinTransformer": (([4, 4], 24, [2, 2], [3, 6], [4, 4]), 64),
    }[name]
    model = with_lively_weights(getattr(models, name)(*arguments))
    example = torch.randn(1, 3, size, size, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert "head" in {s.kind for s in spaces}
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


def test_running_a_model_before_makes_no_difference() -> None:
    """Some modules look a bias up once and keep it: neither tracing nor a cut may see the kept one."""
    timm = pytest.importorskip("timm")
    model = with_lively_weights(timm.create_model("efficientformer_l1", depths=(1, 1, 1, 2)))
    example = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    with torch.no_grad():
        model.eval()(example)
    spaces = fp.discover(model, example)
    assert any(s.kind == "head" for s in spaces)
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "t5"])
def test_a_cut_language_model_generates_with_its_cache(family: str) -> None:
    model = with_lively_weights(hugging_face(family))
    example = HUGGING_FACE[family][3]()
    spaces = fp.discover(model, example)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, 1))
    small, masked = fp.cut(model, plan), fp.mask(model, plan)
    prompt = {"input_ids": example["input_ids"]}
    options = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cached, plain, full = (
            m.generate(**prompt, **options, use_cache=c)
            for m, c in ((small, True), (small, False), (masked, True))
        )
    assert torch.equal(cached, plain)
    assert torch.equal(cached, full)


def test_kinds_and_skip_on_a_transformer() -> None:
    model, example = hugging_face("bert"), tokens_of("bert")
    assert {s.kind for s in fp.discover(model, example, kinds=["head"])} == {"head"}
    names = fp.discover(model, example, skip=["bert.encoder.layer.0", "bert.pooler"]).names
    assert all(name.startswith("bert.encoder.layer.1") for name in names)


def tokens_of(family: str) -> dict[str, torch.Tensor]:
    return HUGGING_FACE[family][3]()


def test_attention_implementations_agree() -> None:
    example = tokens_of("llama")
    eager = copy.deepcopy(hugging_face("llama")).double()
    eager.set_attn_implementation("eager")
    spaces = fp.discover(eager, example)
    assert [s.size for s in spaces if s.kind == "head"] == [2, 2]
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, 0))
    small = fp.cut(eager, plan)
    fast = copy.deepcopy(small)
    fast.set_attn_implementation("sdpa")
    assert (
        difference(small, fast, doubled(example)) < 1e-6
    )  # transformers' eager attention takes its softmax in float32


def test_one_budget_over_heads_and_hidden_units_with_limits_for_each_kind() -> None:
    model, example = hugging_face("bert"), tokens_of("bert")
    data = [(tokens_of("bert"), torch.tensor([0, 1])) for _ in range(4)]
    scores = fp.score(model, data, spaces=fp.discover(model, example), removal="l2")
    plan = fp.allocate(scores, keep=fp.Budget("flops", 0.7), min_keep={"head": 3, "hidden": 0.25})
    assert abs(plan.share("flops") - 0.7) < 0.05
    kept = {s.name: s.size - plan.depths[s.name] for s in plan.spaces}
    assert all(kept[s.name] >= (3 if s.kind == "head" else s.size / 4) for s in plan.spaces)
    hidden = fp.allocate(scores.only(kinds=["hidden"], skip=["bert.pooler"]), keep=fp.Budget("flops", 0.8))
    assert {s.kind for s in hidden.spaces} == {"hidden"}
    assert "bert.pooler.dense" in hidden.spaces.left_out
    small = fp.cut(model, hidden)
    assert fp.count_flops(small, example) == hidden.predicted["flops"]
    assert fp.count_params(small) == hidden.predicted["params"]
    with pytest.raises(fp.FairprunerError, match="Unknown kind 'heads': did you mean 'head'"):
        fp.allocate(scores, keep=fp.Budget("flops", 0.7), min_keep={"heads": 3})
