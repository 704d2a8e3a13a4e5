"""Files from strangers: whatever is in them, the answer is right or one FairprunerError, soon and in little
memory.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_storage import hand_made_scores
from torch import nn

import fairpruner as fp
from fairpruner.core.cost_model import Factor
from fairpruner.core.latency import LatencyTable, TimedOp
from fairpruner.core.sealed import digest, read_tensors
from fairpruner.inputs import data_files
from fairpruner.inputs import text as texts
from fairpruner.inputs.data_files import read_bytes
from fairpruner.inputs.datasets import Preprocessing, Sampling, load_data
from fairpruner.inputs.shard_index import shard_files
from fairpruner.inputs.sources import resolve
from fairpruner.inputs.text import Columns, load_text, read_rows
from fairpruner.inputs.weights import load_weights
from fairpruner.models.recorded import draw_example, record
from fairpruner.recovery.checkpoints import FILE

EXAMPLE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = 4, 1
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, T, 16]
        n, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(n, t, -1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.attention, self.head = nn.Conv2d(8, 16, 3), Attention(), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv2(torch.relu(self.bn(self.conv1(x)))))
        tokens = x.flatten(2).transpose(1, 2)
        return self.head((tokens + self.attention(tokens)).mean(1))


@pytest.fixture(scope="module")
def plan() -> fp.Plan:
    spaces = fp.discover(Net().eval(), EXAMPLE)
    assert {"channel", "head"} <= {space.kind for space in spaces}
    heads = next(space.name for space in spaces if space.kind == "head")
    return fp.Plan.removing(spaces, {"conv1": (1, 6, 2), heads: (3, 0)})


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """No test of this file may take more than 4 GB beyond what is mapped already."""
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def seal(path: Path, kind: str, content: dict[str, Any]) -> Path:
    """Write JSON with a digest that fits, as anyone can."""
    body = {k: v for k, v in content.items() if k not in ("format", "version", "digest")}
    sealed = {"format": f"fairpruner {kind}", "version": 1, **body, "digest": digest(body)}
    path.write_text(json.dumps(sealed))
    return path


def item(content: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(space for space in content["spaces"]["items"] if space["kind"] == kind)


# Plans: what discovery says is believed, what a file says is verified


def test_a_plan_from_a_file_cuts_as_it_did_before(plan: fp.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded, net = fp.Plan.load(tmp_path / "plan.json"), Net().eval()
    for apply in (fp.cut, fp.mask):
        torch.testing.assert_close(apply(net, loaded)(EXAMPLE), apply(net, plan)(EXAMPLE), rtol=0, atol=0)
    assert dict(loaded.predicted) == dict(plan.predicted)


def reverse_owners(content: dict[str, Any]) -> None:
    """The read side of conv1 counts its units backwards: a cut would keep the wrong columns."""
    owner = next(s for s in item(content, "channel")["slices"] if s["role"] == "read")
    owner["owner"] = [[unit, 1, 1] for unit in range(7, -1, -1)]


def drop_a_read_slice(content: dict[str, Any]) -> None:
    slices = item(content, "channel")["slices"]
    slices.remove(next(s for s in slices if s["role"] == "read"))


def drop_a_carried_slice(content: dict[str, Any]) -> None:
    slices = item(content, "channel")["slices"]
    slices.remove(next(s for s in slices if s["role"] == "carry"))


def call_reading_carrying(content: dict[str, Any]) -> None:
    next(s for s in item(content, "channel")["slices"] if s["role"] == "read")["role"] = "carry"


def drop_the_counts(content: dict[str, Any]) -> None:
    item(content, "head")["counts"] = []


def call_it_a_block(content: dict[str, Any]) -> None:
    """Blocks are not traced, so a plan may not hide other units behind their kind."""
    item(content, "channel")["kind"] = "block"


def replace_a_module(content: dict[str, Any]) -> None:
    gone = {"module": "conv1", "units": [0], "by": "input", "argument": 0, "outputs": 0}
    item(content, "channel")["replaced"] = [{**gone, "units": list(range(8))}]


def own_the_tensor_nope(content: dict[str, Any]) -> None:
    item(content, "channel")["slices"][0]["tensor"] = "nope"


def own_dim_7(content: dict[str, Any]) -> None:
    item(content, "channel")["slices"][0]["dim"] = 7


def own_too_few_indices(content: dict[str, Any]) -> None:
    item(content, "channel")["slices"][0]["owner"] = [[0, 7, 1]]


def own_nothing(content: dict[str, Any]) -> None:
    item(content, "channel")["slices"] = []


def own_twice(content: dict[str, Any]) -> None:
    slices = item(content, "channel")["slices"]
    slices.append(slices[0])


def count_with(module: str, attribute: str, length: int) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        count = {"module": module, "attribute": attribute, "owner": [[0, 1, length]]}
        item(content, "head")["counts"].append(count)

    change.__name__ = f"count_with_{module}_{attribute}"
    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reverse_owners, "does not cut Net correctly: mask and cut differ"),
        (drop_a_read_slice, "does not cut Net correctly"),
        (drop_a_carried_slice, "does not cut Net correctly"),
        (call_reading_carrying, "does not cut Net correctly"),
        (drop_the_counts, "does not cut Net correctly"),
        (call_it_a_block, "of kind block owns more than whole tensors"),
        (replace_a_module, "of kind channel replaces modules"),
        (own_the_tensor_nope, "owns 'nope': no such tensor"),
        (own_dim_7, "dim 7"),
        (own_too_few_indices, "owns 7 indices of"),
        (own_nothing, "loses units but owns no tensor"),
        (own_twice, "own the same indices of"),
        (count_with("", "forward", 1), r"attribute \.forward, which is None"),
        (count_with("conv1", "forward", 1), r"conv1.forward, which is None"),
        (count_with("attention", "training", 1), "which is False"),
        (
            count_with("attention", "num_heads", 3),
            "counts 3 with the attribute attention.num_heads, which is 4",
        ),
        (count_with("nowhere", "num_heads", 3), "which is None"),
        (count_with("attention", "scale", 1), "sets the attribute scale, which does not count these units"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_plan_with_a_false_slice_or_count_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, plan: fp.Plan, tmp_path: Path
) -> None:
    content = plan.to_json()
    change(content)
    loaded = fp.Plan.load(seal(tmp_path / "plan.json", "plan", content))
    net = Net().eval()
    for apply in (fp.cut, fp.mask):
        with pytest.raises(fp.FairprunerError, match=message):
            apply(net, loaded)


class Windowed(nn.Module):
    """Attention over the last tokens; with one token, queries and keys do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.window = 4, 8
        self.queries, self.keys, self.values, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, -self.window :]
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def windowed_plan(change: Callable[[dict[str, Any], dict[str, Any]], None], tmp_path: Path) -> fp.Plan:
    """A plan for `Windowed` from a file whose space and recorded example were changed."""
    spaces = fp.discover(Windowed(), torch.randn(1, 5, 8))
    content = fp.Plan.removing(spaces, {"queries": (1,)}).to_json()
    change(content["spaces"]["items"][0], content["spaces"]["examples"]["list"][0])
    return fp.Plan.load(seal(tmp_path / "plan.json", "plan", content))


def test_wrong_units_are_found_also_if_the_recorded_example_hides_them(tmp_path: Path) -> None:
    def reverse_queries(space: dict[str, Any], example: dict[str, Any]) -> None:
        for part in space["slices"]:
            if part["tensor"].startswith("queries"):
                part["owner"] = [[head, 1, 2] for head in (3, 2, 1, 0)]
        example["shape"] = [1, 1, 8]

    assert fp.cut(Windowed(), windowed_plan(lambda space, example: None, tmp_path)).heads == 3
    with pytest.raises(fp.FairprunerError, match=r"a unit of queries.weight is not one unit of the model"):
        fp.cut(Windowed(), windowed_plan(reverse_queries, tmp_path))


def test_a_plan_cannot_set_a_number_that_the_recorded_example_does_not_use(tmp_path: Path) -> None:
    def shrink_the_window(space: dict[str, Any], example: dict[str, Any]) -> None:
        space["counts"].append({"module": "", "attribute": "window", "owner": [[0, 4, 2]]})

    with pytest.raises(fp.FairprunerError, match="sets the attribute window"):
        fp.cut(Windowed(), windowed_plan(shrink_the_window, tmp_path))


def test_a_plan_cannot_cut_what_the_recorded_example_does_not_use(tmp_path: Path) -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.rare = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
            out: torch.Tensor = (self.rare if rare else self.second)(self.first(x).relu())
            return out

    examples = [(torch.randn(1, 4), rare) for rare in (False, True)]
    spaces = fp.discover(Branched(), examples[0], more_examples=examples[1:])
    content = fp.Plan.removing(spaces, {"first": (1,)}).to_json()
    fp.cut(Branched(), fp.Plan.load(seal(tmp_path / "plan.json", "plan", content)))
    for part in content["spaces"]["items"][0]["slices"]:
        if part["tensor"] == "rare.weight":
            part["owner"] = [[unit, 1, 1] for unit in range(5, -1, -1)]
    del content["spaces"]["examples"]["list"][1]
    with pytest.raises(fp.FairprunerError, match=r"the example does not use rare.weight"):
        fp.cut(Branched(), fp.Plan.load(seal(tmp_path / "plan.json", "plan", content)))


def test_what_a_plan_says_it_costs_is_worked_out_anew(plan: fp.Plan, tmp_path: Path) -> None:
    content = plan.to_json()
    content["predicted"]["flops"] = content["original"]["params"] = 1
    loaded = fp.Plan.load(seal(tmp_path / "plan.json", "plan", content))
    assert dict(loaded.predicted) == dict(plan.predicted)
    assert dict(loaded.original) == dict(plan.original)


def test_a_plan_that_lies_about_the_parameters_it_leaves_is_refused(plan: fp.Plan, tmp_path: Path) -> None:
    content = plan.to_json()
    content["spaces"]["costs"]["params"] = []
    loaded = fp.Plan.load(seal(tmp_path / "plan.json", "plan", content))
    with pytest.raises(fp.FairprunerError, match="it predicts 0 params, and the cut model has"):
        fp.cut(Net().eval(), loaded)


def test_a_plan_that_records_no_example_needs_one(plan: fp.Plan, tmp_path: Path) -> None:
    content = plan.to_json()
    content["spaces"]["examples"] = None
    loaded = fp.Plan.load(seal(tmp_path / "plan.json", "plan", content))
    with pytest.raises(fp.FairprunerError, match="records no example to verify it on: give example="):
        fp.cut(Net(), loaded)
    assert fp.cut(Net(), loaded, example=EXAMPLE).conv1.out_channels == 5


def test_scores_from_a_file_make_plans_that_are_verified(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    data = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 5)]
    scores = fp.score(net, data, spaces=fp.discover(net, EXAMPLE), removal="l1")
    assert not scores.spaces.from_file
    scores.save(tmp_path / "s.safetensors")
    loaded = fp.Scores.load(tmp_path / "s.safetensors")
    assert loaded.spaces.from_file
    fp.cut(net, fp.allocate(loaded, keep=fp.Budget("flops", 0.6)))


def test_a_loaded_folder_is_verified_too(plan: fp.Plan, tmp_path: Path) -> None:
    fp.save(fp.cut(Net(), plan), plan, tmp_path / "small")
    content = json.loads((tmp_path / "small" / "plan.json").read_text())
    reverse_owners(content)
    seal(tmp_path / "small" / "plan.json", "plan", content)
    with pytest.raises(fp.FairprunerError, match="does not cut Net correctly"):
        fp.load(tmp_path / "small", build=Net)


@pytest.mark.parametrize(
    "example",
    [
        torch.zeros(1, 3),
        (torch.zeros(2, 3), [torch.ones(1, dtype=torch.int64)], None),
        {
            "input_ids": torch.tensor([[5, 9, 2]]),
            "attention_mask": torch.ones(1, 3, dtype=torch.bool),
            "n": 3,
        },
    ],
)
def test_an_example_is_drawn_as_it_was_recorded_and_its_numbers_are_not_kept(example: Any) -> None:
    recorded = json.loads(json.dumps(record(example)))
    again = draw_example(recorded, torch.device("cpu"))
    assert record(again) is not None
    assert [(t.shape, t.dtype) for t in tensors(again)] == [(t.shape, t.dtype) for t in tensors(example)]
    if isinstance(example, dict):
        assert again["attention_mask"].all()
        assert int(again["input_ids"].min()) >= 2
        assert int(again["input_ids"].max()) <= 9


def test_a_mask_that_hides_some_tokens_is_drawn_with_some_hidden() -> None:
    """Whichever value hides them: nn.TransformerEncoder ignores where a mask is True."""
    for dtype in (torch.bool, torch.int64):
        mask = draw_example(record(torch.tensor([[0, 0, 1]] * 2).to(dtype)), torch.device("cpu"))
        assert mask.dtype == dtype
        assert mask.tolist() == [[1, 0, 1]] * 2


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in inner for tensor in tensors(part)]


def test_what_cannot_be_recorded_is_none() -> None:
    assert record(object()) is None
    assert record({"x": torch.full((2,), float("-inf"))}) is None
    assert record([torch.ones(2, 2).to_sparse()]) is None
    assert record(nn.utils.rnn.pack_sequence([torch.ones(2, 3)])) is None  # a named tuple


def test_a_recorded_example_of_a_billion_numbers_is_refused() -> None:
    for shape, message in (([2**20, 2**10], "more than"), ([1] * 16 + [2**24], "17 sides")):
        big = {"tuple": [{"shape": shape, "type": "float32", "range": [0, 1]}]}
        with pytest.raises(fp.FairprunerError, match=message):
            draw_example(big, torch.device("cpu"))


# Bombs and nonsense in sealed files


def latency_content() -> dict[str, Any]:
    table = LatencyTable((Factor(8, {}),), (TimedOp((0,), 1, 1, 1, (1,)),), 4.0, 8, "abc")
    return table.to_json()


def set_at(*path: Any) -> Callable[[dict[str, Any], Any], None]:
    def change(content: Any, value: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    change.__name__ = ".".join(map(str, path))
    return change


SPACE = ("spaces", "items", 0)
BAD_PLAN: list[tuple[Callable[[dict[str, Any], Any], None], Any]] = [
    (set_at(*SPACE, "slices", 0, "owner"), [[0, 1, 400_000_000]]),
    (set_at(*SPACE, "slices", 0, "owner"), [[0, 1, 10**12]]),
    (set_at(*SPACE, "slices", 0, "owner"), [[0, 10**12, 1]]),
    (set_at(*SPACE, "slices", 0, "owner"), [[0, 2**63, 2**63]]),
    (set_at(*SPACE, "slices", 0, "owner"), []),
    (set_at(*SPACE, "slices", 0, "owner"), {}),
    (set_at(*SPACE, "slices", 0, "owner"), [[0, -1, -(10**12)]]),
    (set_at(*SPACE, "slices", 0, "dim"), -1),
    (set_at(*SPACE, "slices", 0, "dim"), 2**70),
    (set_at(*SPACE, "slices", 0, "role"), ["read"]),
    (set_at(*SPACE, "size"), 10**12),
    (set_at(*SPACE, "size"), 2**64),
    (set_at(*SPACE, "groups"), 0),
    (set_at(*SPACE, "kind"), []),
    (set_at(*SPACE, "name"), 3),
    (set_at(*SPACE, "counts"), None),
    (set_at("spaces", "items"), None),
    (set_at("spaces", "left_out"), []),
    (set_at("spaces", "fingerprint"), None),
    (set_at("spaces", "costs", "factors", 0, "size"), -1),
    (set_at("spaces", "costs", "factors", 0, "size"), 2**63),
    (set_at("spaces", "costs", "factors", 0, "owned"), {"conv1": [[-1, 1, 8]]}),
    (set_at("spaces", "costs", "factors", 0, "owned"), {"conv1": [[0, 1, 10**11]]}),
    (set_at("spaces", "costs", "params"), [[2**63, []]]),
    (set_at("spaces", "costs", "params"), [[2**61, []], [2**61, []], [2**61, []]]),
    (set_at("spaces", "costs", "params"), [[1, [99999]]]),
    (set_at("spaces", "costs", "params"), [[-1, []]]),
    (set_at("spaces", "costs", "flops"), [1]),
    (set_at("removed", "conv1"), [2**64]),
    (set_at("removed", "conv1"), list(range(8))),
    (set_at("removed", "conv1"), [1.0]),
    (set_at("removed", "conv1"), "text"),
    (set_at("removed"), None),
    (set_at("alpha"), ""),
    (set_at("alpha"), 2**2000),
    (set_at("rule"), {}),
    (set_at("exact"), "no"),
    (set_at("predicted"), {"latency_ms": -1}),
    (set_at("predicted"), {"latency_ms": "x"}),
]


@pytest.mark.parametrize(("change", "value"), BAD_PLAN, ids=lambda v: getattr(v, "__name__", str(v)[:30]))
def test_nonsense_in_a_plan_is_one_sentence(
    change: Callable[[dict[str, Any], Any], None], value: Any, plan: fp.Plan, tmp_path: Path
) -> None:
    content = json.loads(json.dumps(plan.to_json()))
    change(content, value)
    with pytest.raises(fp.FairprunerError) as raised:
        fp.Plan.load(seal(tmp_path / "plan.json", "plan", content))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("original", "x"),
        ("original", 0),
        ("original", float("1e999")),
        ("multiple", 0),
        ("multiple", 10**9),
        ("ops", []),
        ("ops", [[[3], 1, 1, 1, [1]]]),
        ("ops", [[[0], 1, 1, 1, []]]),
        ("ops", [[[0], -1, 1, 1, [1]]]),
        ("ops", [[[0], 1]]),
        ("ops", None),
        ("factors", [{"size": 2**62, "owned": {}}]),
        ("factors", [{"size": 8, "owned": {"a": [[0, 1, 10**12]]}}]),
        ("trials", [[1]]),
        ("setting", []),
        ("fingerprint", 3),
    ],
)
def test_nonsense_in_a_latency_table_is_one_sentence(name: str, value: Any, tmp_path: Path) -> None:
    content = {**latency_content(), name: value}
    if value == float("inf"):
        (tmp_path / "t.json").write_text(
            '{"format": "fairpruner latency table", "version": 1, "x": Infinity}'
        )
    else:
        seal(tmp_path / "t.json", "latency table", content)
    with pytest.raises(fp.FairprunerError):
        LatencyTable.load(tmp_path / "t.json")


READERS: dict[str, Callable[[Path], Any]] = {
    "plan": fp.Plan.load,
    "latency table": LatencyTable.load,
    "measured": lambda path: fp.report(hand_made_scores(), measured=path),
    "index": lambda path: shard_files(path.rename(path.parent / "model.safetensors.index.json").parent),
    "jsonl": lambda path: read_rows(path.rename(path.with_suffix(".jsonl"))),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format": "fairpruner plan", "version": 1, "a": "\\ud800"}',
        '{"format": "fairpruner latency table", "version": 1, "\\udfff": 1}',
        '{"model": {"flops": ' + "9" * 5000 + "}}",
        '{"model": {"\\ud800": 1}}',
        '{"model": {"flops": NaN}}',
        "null",
        "",
        "\x00",
    ],
    ids=[
        "lists",
        "mappings",
        "surrogate",
        "surrogate-key",
        "digits",
        "measured",
        "nan",
        "null",
        "empty",
        "nul",
    ],
)
def test_json_that_python_trips_over_is_one_sentence(reader: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(fp.FairprunerError):
        READERS[reader](tmp_path / "file.json")


@pytest.mark.parametrize("reader", READERS)
def test_bytes_that_are_no_text_are_one_sentence(reader: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(fp.FairprunerError):
        READERS[reader](tmp_path / "file.json")


def scores_file(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    hand_made_scores().save(path)
    content, arrays = read_tensors(path, "scores")
    change(content, arrays)
    body = {k: v for k, v in content.items() if k not in ("format", "version", "digest")}
    sealed = {**content, "digest": digest(body, arrays)}
    save_file(arrays, path, metadata={"fairpruner": json.dumps(sealed)})
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda c, a: a.update({"halves/taylor/a.conv": torch.zeros(3, dtype=torch.float64)}),
        lambda c, a: a.update({"halves/taylor/a.conv": torch.zeros(2, 3)}),
        lambda c, a: a.update({"removals/l1/heads": torch.zeros(2, dtype=torch.complex64)}),
        lambda c, a: a.update({"removals/l1/heads": torch.zeros(2, dtype=torch.bfloat16)}),
        lambda c, a: a.update({"removals/l1/heads": torch.full((2,), torch.nan, dtype=torch.float64)}),
        lambda c, a: a.pop("removals/l1/heads"),
        lambda c, a: c.update(samples=-1),
        lambda c, a: c.update(samples="many"),
        lambda c, a: c.update(settings=[]),
        lambda c, a: c.update(signals={"removals": [1], "protections": ["taylor"]}),
        lambda c, a: c.update(signals=None),
        lambda c, a: c.pop("spaces"),
    ],
    ids=range(12),
)
def test_nonsense_in_scores_is_one_sentence(change: Any, tmp_path: Path) -> None:
    with pytest.raises(fp.FairprunerError):
        fp.Scores.load(scores_file(tmp_path / "s.safetensors", change))


def test_a_folder_with_integer_or_complex_tensors_is_refused(plan: fp.Plan, tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.int32, torch.complex64, torch.bool)):
        folder = tmp_path / str(number)
        fp.save(fp.cut(Net(), plan), plan, folder)
        content, arrays = read_tensors(folder / "model.safetensors", "model")
        arrays["head.weight"] = arrays["head.weight"].to(dtype)
        sealed = {**content, "digest": digest({"plan": content["plan"]}, arrays)}
        save_file(arrays, folder / "model.safetensors", metadata={"fairpruner": json.dumps(sealed)})
        with pytest.raises(fp.FairprunerError, match=r"head\.weight"):
            fp.load(folder, build=Net)


def test_a_folder_with_a_null_report_is_one_sentence(plan: fp.Plan, tmp_path: Path) -> None:
    fp.save(fp.cut(Net(), plan), plan, tmp_path / "small")
    (tmp_path / "small" / "report.json").write_text("null")
    with pytest.raises(fp.FairprunerError, match="is not a report of fairpruner"):
        fp.report(tmp_path / "small")


@pytest.mark.parametrize("name", ["plan.json", "s.safetensors", "d.npz", "t.jsonl", "w.pt"])
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    readers: dict[str, Callable[[Path], Any]] = {
        "plan.json": fp.Plan.load,
        "s.safetensors": fp.Scores.load,
        "d.npz": lambda path: load_data(str(path), Sampling(), Preprocessing()),
        "t.jsonl": read_rows,
        "w.pt": lambda path: load_weights(nn.Linear(1, 1), path),
    }
    with pytest.raises(fp.FairprunerError, match=r"pipe|No weights file"):
        readers[name](tmp_path / name)


# Checkpoints of a recovery


def checkpoint_of(folder: Path) -> Callable[[], nn.Module]:
    data = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(3)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return lambda: fp.recover(net, data, epochs=2, validation=data, folder=folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda c, t: c["content"].update(epoch=99),
        lambda c, t: c["content"].update(epoch=None),
        lambda c, t: c["content"].update(position=-1),
        lambda c, t: c["content"].update(tally={"samples": "x"}),
        lambda c, t: c["content"].update(tally={"wrong": 1}),
        lambda c, t: c["content"].update(history=[{"number": 7}]),
        lambda c, t: c["content"].update(history=[3]),
        lambda c, t: c["content"].update(best=5),
        lambda c, t: c["content"].update(optimizer={"99/step": 1}),
        lambda c, t: c["content"].update(optimizer=[]),
        lambda c, t: c.update(content=None),
        lambda c, t: c.update(settings=[]),
        lambda c, t: c.update(groups=["model"]),
        lambda c, t: c.update(groups=[{}]),
        lambda c, t: t.update({"model/0.weight": torch.zeros(1)}),
        lambda c, t: t.pop("model/0.weight"),
        lambda c, t: t.update({"best/0.weight": torch.zeros(4)}),
        lambda c, t: t.update({"optimizer/x/momentum_buffer": torch.zeros(4)}),
    ],
    ids=range(18),
)
def test_nonsense_in_a_checkpoint_is_one_sentence(change: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run = checkpoint_of(tmp_path)
    run()
    content, arrays = read_tensors(tmp_path / FILE, "checkpoint")
    change(content, arrays)
    body = {k: v for k, v in content.items() if k not in ("format", "version", "digest")}
    sealed = {**content, "digest": digest(body, arrays)}
    save_file(arrays, tmp_path / FILE, metadata={"fairpruner": json.dumps(sealed)})
    with pytest.raises(fp.FairprunerError):
        run()


# Weights


@pytest.mark.parametrize(
    "content",
    [
        b"hello, this is text\n",
        b"",
        b"\x80\x02}q\x00.",
        b"PK\x03\x04" + b"\0" * 50,
        b"(" * 5000,
        b"\x80\x04K",
    ],
    ids=["text", "empty", "pickle", "zip", "marks", "cut"],
)
def test_a_pt_file_of_anything_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(fp.FairprunerError, match=r"w\.pt"):
        load_weights(nn.Linear(1, 1), tmp_path / "w.pt")


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.zeros(1, 1, dtype=torch.complex64), "bias": torch.zeros(1)},
        tmp_path / "w.safetensors",
    )
    with pytest.raises(fp.FairprunerError, match=r"weight .*complex64"):
        load_weights(nn.Linear(1, 1), tmp_path / "w.safetensors")


# Data


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def declaring(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 64


@pytest.mark.parametrize(
    "x",
    [
        npy(np.float32(3)),
        npy(np.zeros((2, 3), dtype=np.complex64)),
        npy(np.zeros((2, 3), dtype=np.int64)),
        npy(np.array(["a", "b"])),
        declaring("(2, 250000000)"),
        declaring("(2, 10000000000000)"),
        declaring("(-1, 16)"),
        declaring("(2.5,)"),
        declaring("[" * 500),
        b"\x93NUMPY\x09\x00",
        b"",
    ],
    ids=["0-d", "complex", "int", "text", "2GB", "80TB", "negative", "float", "nested", "version", "empty"],
)
def test_odd_arrays_are_one_sentence(x: bytes, tmp_path: Path) -> None:
    path = npz(tmp_path / "d.npz", x=x, y=npy(np.array([0, 1])))
    with pytest.raises(fp.FairprunerError, match=r"d\.npz"):
        load_data(str(path), Sampling(), Preprocessing())


def test_an_npz_that_unpacks_to_a_multiple_of_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "SMALL", 2**20)
    zeros = npy(np.zeros((2, 2**19), np.float32))
    npz(tmp_path / "d.npz", x=zeros, y=npy(np.array([0, 1])))
    with pytest.raises(fp.FairprunerError, match="expected at most 100 times its size"):
        load_data(str(tmp_path / "d.npz"), Sampling(), Preprocessing())


@pytest.mark.parametrize("label", [10**9, -(10**9), 2**63])
def test_labels_that_are_no_classes_are_one_sentence(label: int, tmp_path: Path) -> None:
    kind = np.uint64 if label >= 2**63 else np.int64
    path = npz(
        tmp_path / "d.npz", x=npy(np.zeros((2, 3), np.float32)), y=npy(np.array([0, label], dtype=kind))
    )
    with pytest.raises(fp.FairprunerError, match="expected class indices"):
        load_data(str(path), Sampling(), Preprocessing())


def test_an_xz_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "TEXT_LIMIT", 2**20)
    (tmp_path / "t.jsonl.xz").write_bytes(lzma.compress(bytes(2**22), preset=0))
    assert (tmp_path / "t.jsonl.xz").stat().st_size < 2**12
    with pytest.raises(fp.FairprunerError, match="unpacks to more than"):
        read_rows(tmp_path / "t.jsonl.xz")


def test_xz_files_one_after_the_other_are_read_and_half_a_one_is_refused(tmp_path: Path) -> None:
    packed = lzma.compress(b'{"text": "a"}\n') + lzma.compress(b'{"text": "b"}\n')
    (tmp_path / "t.jsonl.xz").write_bytes(packed)
    assert read_bytes(tmp_path / "t.jsonl.xz") == b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / "t.jsonl.xz").write_bytes(packed[:-10])
    with pytest.raises(fp.FairprunerError, match="cannot be read"):
        read_rows(tmp_path / "t.jsonl.xz")


@pytest.mark.parametrize("label", ["²", "9" * 5000, str(10**30), 10**30, 1.5, None, [1], "٣"])
def test_odd_labels_are_words_or_one_sentence(label: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps({"text": "a", "label": value}) for value in (label, "0")), encoding="utf-8"
    )

    def tokenizer(texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(len(texts), 2, dtype=torch.long)}

    def labels() -> list[int]:
        batches = load_text(tmp_path / "t.jsonl", tokenizer, Sampling(), Columns(label="label"))
        return [int(x) for batch in batches for x in batch["labels"]]

    if isinstance(label, str):
        assert sorted(labels()) == [0, 1]  # words, numbered in sorted order
    else:
        with pytest.raises(fp.FairprunerError, match=r"t\.jsonl"):
            labels()


def picture(folder: Path, width: int, height: int) -> Path:
    from PIL import Image

    (folder / "class").mkdir(parents=True)
    Image.new("1", (width, height)).save(folder / "class" / "a.png")
    return folder


@pytest.mark.parametrize(("width", "height"), [(60000, 1), (1, 60000), (9000, 9000), (14000, 14000)])
def test_an_oversized_image_is_one_sentence(width: int, height: int, tmp_path: Path) -> None:
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # for writing it
    try:
        picture(tmp_path, width, height)
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    with pytest.raises(fp.FairprunerError, match=r"Image .*a\.png"):
        list(load_data(str(tmp_path), Sampling(), Preprocessing(size=224)))


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + b"\0" * 30, b"GIF89a", b"RIFF....WEBPVP8 "])
def test_a_broken_image_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (picture(tmp_path, 4, 4) / "class" / "a.png").write_bytes(content)
    with pytest.raises(fp.FairprunerError, match=r"Image .*a\.png cannot be read"):
        list(load_data(str(tmp_path), Sampling(), Preprocessing(size=224)))


def test_odd_parquet_files_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    for content in (b"", b"PAR1", b"PAR1" + b"\0" * 40 + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(fp.FairprunerError, match="cannot be read"):
            read_rows(path)
    monkeypatch.setattr(texts, "MOST_ROWS", 10**5)
    parquet.write_table(pyarrow.table({"text": pyarrow.array(["a"] * (10**5 + 1)).dictionary_encode()}), path)
    assert path.stat().st_size < 10**5
    with pytest.raises(fp.FairprunerError, match="rows, expected at most"):
        read_rows(path)


# Models


def setting(path: str, **attributes: Any) -> dict[str, Any]:
    """A configuration of a pruned model that sets attributes of one module."""
    return {"pruned": {"tensors": {}, "modules": {path: attributes}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_implementation": "strangers/kernel:run"}, "code that would be downloaded and run"),
        ({"_attn_implementation": "strangers/kernel:run"}, "code that would be downloaded and run"),
        ({"experts_implementation": "strangers/kernel:run"}, "code that would be downloaded and run"),
        ({"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}, "cannot be loaded: ValueError"),
        ({"architectures": ["pipeline"]}, "'pipeline', which is no model of transformers"),
        ({"architectures": [3]}, "which is no model of transformers"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers .* is 1e\+09, expected at most 10,000"),
        ({"num_hidden_layers": 2}, "hold 616 numbers, and its configuration needs 1,080"),
        ({"hidden_size": 10**9}, "hold 616 numbers, and its configuration needs 77,000,000,000"),
        (setting("model.layers.0", forward=3), "sets forward of a LlamaDecoderLayer to 3"),
        (setting("model", training=1), "sets training of a LlamaModel to 1"),
        (setting("model.layers.0.mlp", hidden_size="8"), "sets hidden_size of a LlamaMLP to 8"),
        (setting("model.layers.0.mlp", **{"config.to_dict": 3}), "sets to_dict of a LlamaConfig to 3"),
        (
            {
                "pruned": {
                    "tensors": {},
                    "modules": {},
                    "removed": [
                        {"module": "model.layers.0", "by": "input", "argument": 0, "outputs": 10**12}
                    ],
                }
            },
            "1000000000000 outputs",
        ),
    ],
    ids=str,
)
def test_a_configuration_of_a_stranger_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """It can neither have code fetched, nor replace methods, nor ask for more than its files hold."""
    transformers = pytest.importorskip("transformers", minversion="5")
    from fairpruner.inputs.sources import load_model

    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **tiny)).save_pretrained(tmp_path)
    load_model(f"hf:{tmp_path}")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(fp.FairprunerError, match=message):
        load_model(f"hf:{tmp_path}")


def test_weights_that_are_missing_in_a_folder_are_not_replaced_by_random_ones(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from safetensors.torch import load_file, save_file

    from fairpruner.inputs.sources import load_model

    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **tiny)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["renamed"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(fp.FairprunerError, match=r"1 weights of LlamaForCausalLM are missing .*model.norm"):
        load_model(f"hf:{tmp_path}")


def test_a_source_leaves_the_search_path_as_it_was(tmp_path: Path) -> None:
    import sys

    (tmp_path / "neighbour_of_it.py").write_text("WIDTH = 3\n")
    (tmp_path / "late_neighbour.py").write_text("DEPTH = 1\n")
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom neighbour_of_it import WIDTH\n\n\ndef build():\n"
        "    from late_neighbour import DEPTH\n    return nn.Linear(WIDTH, DEPTH)\n\n\n"
        "def batches():\n    import late_neighbour\n    yield late_neighbour.DEPTH\n"
    )
    before = list(sys.path)
    from fairpruner.inputs.sources import load_model

    assert load_model(f"{tmp_path}/net.py:build").in_features == 3
    assert list(load_data(f"{tmp_path}/net.py:batches", Sampling(), Preprocessing())) == [1]
    resolve(f"{tmp_path}/net.py:batches")
    assert sys.path == before
