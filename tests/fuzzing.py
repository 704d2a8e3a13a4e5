"""Mutants of every file that fairpruner reads, and what must hold for each: right, or one FairprunerError.

A case is a string of bytes that decides everything, so that hypothesis, atheris and a plain counter can all
drive it, and a failing one can be run again.
"""

from __future__ import annotations

import io
import json
import lzma
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

import fairpruner as fp
from fairpruner.core.cost_model import Factor
from fairpruner.core.latency import LatencyTable, TimedOp
from fairpruner.core.sealed import digest, write_tensors
from fairpruner.core.tensor_files import read_all
from fairpruner.inputs.datasets import Preprocessing, Sampling, load_data
from fairpruner.inputs.hugging_face import configuration
from fairpruner.inputs.shard_index import shard_files
from fairpruner.inputs.sources import load_weights
from fairpruner.inputs.text import Columns, load_text
from fairpruner.recovery.checkpoints import Checkpoint, load_checkpoint, save_checkpoint

EXAMPLE = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
NASTY: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\ud800", "²", "../x", "forward", [], {}, [[]], [{}], 0, 1, -1, 2, 7, 0.5),
    *(-0.0, 1e308, 2**31, 2**62, 2**63, 2**64, 10**30, -(2**63), [[0, 1, 10**12]], [[0, 10**9, 10**9]]),
    *([0, 0], [0, 1, 2, 3, 4, 5], [[0, 1, 6]], [[-1, 1, 6]], [[5, 1, 1], [4, 1, 1]], {"a": [1]}, 1e-320),
)


class Bytes:
    """Decisions read from a string of bytes; when it is used up, all are zero."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def below(self, limit: int) -> int:
        width = 1 if limit <= 256 else 2 if limit <= 65536 else 4
        return int.from_bytes(self._data.read(width), "little") % max(limit, 1)

    def pick(self, items: Any) -> Any:
        return items[self.below(len(items))]

    def nasty(self) -> Any:
        return json.loads(json.dumps(self.pick(NASTY)))


# Mutating


def mutate_json(value: Any, bytes_: Bytes) -> Any:
    """Change a few places of a JSON value."""
    value = json.loads(json.dumps(value))
    for _ in range(1 + bytes_.below(3)):
        places = list(_places(value))
        if not places:
            return bytes_.nasty()
        holder, key = bytes_.pick(places)
        what = bytes_.below(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.append(json.loads(json.dumps(holder[key])))
        elif what == 2:
            other, where = bytes_.pick(places)
            try:
                holder[key] = json.loads(json.dumps(other[where]))
            except (KeyError, IndexError):
                holder[key] = None
        elif what == 3 and type(holder[key]) in (int, float):
            holder[key] += bytes_.pick((-1, 1, -2, 0.5, 2**62))
        else:
            holder[key] = bytes_.nasty()
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def mutate_bytes(content: bytes, bytes_: Bytes) -> bytes:
    """Change, cut, repeat or insert a few bytes."""
    changed = bytearray(content)
    for _ in range(1 + bytes_.below(4)):
        place = bytes_.below(len(changed) + 1)
        what = bytes_.below(5)
        if what == 0:
            del changed[place : place + 1 + bytes_.below(64)]
        elif what == 1:
            changed[place:place] = bytes([bytes_.below(256)]) * (1 + bytes_.below(8))
        elif what == 2:
            changed = changed[:place]
        elif what == 3:
            changed[place:place] = changed[place : place + 64]
        elif place < len(changed):
            changed[place] = bytes_.pick((0, 0xFF, 0x7F, 0x80, changed[place] ^ 1, bytes_.below(256)))
    return bytes(changed)


def mutate_text(content: bytes, bytes_: Bytes) -> bytes:
    if bytes_.below(4):
        return mutate_bytes(content, bytes_)
    tokens = (
        b"[" * 5000,
        b'{"a":' * 5000,
        b'"\\ud800"',
        b"9" * 5000,
        b"NaN",
        b"\x00",
        b"\xff",
        b"1e999",
        b"'",
    )
    place = bytes_.below(len(content) + 1)
    return content[:place] + bytes_.pick(tokens) + content[place:]


# Targets


@dataclass(frozen=True)
class Target:
    """A reader: how to write a mutant of its file into a folder, and how to read and use it."""

    write: Callable[[Path, Bytes], None]
    read: Callable[[Path], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 3)
        self.groups = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.norm(self.a(x))))))


@cache
def made() -> tuple[nn.Module, fp.Plan, fp.Scores]:
    """A net in float64, a plan and scores of it."""
    torch.manual_seed(0)
    net = Net().eval()
    data = [(torch.randn(16, 4), torch.arange(16) % 3) for _ in range(2)]
    scores = fp.score(net, data, spaces=fp.discover(net, EXAMPLE), removal="l1")
    return net.double(), fp.allocate(scores, keep=fp.Budget("params", 0.6)), scores


def apply(plan: fp.Plan) -> None:
    """A plan that is accepted cuts as it masks, and costs what it says."""
    net = made()[0]
    small = fp.cut(net, plan)
    masked = fp.mask(net, plan)
    torch.testing.assert_close(small(EXAMPLE.double()), masked(EXAMPLE.double()), rtol=1e-9, atol=1e-9)


def write_sealed(kind: str, content: Callable[[], Any]) -> Callable[[Path, Bytes], None]:
    """A sealed JSON file, changed before or after its digest was made."""

    def write(path: Path, bytes_: Bytes) -> None:
        body = content()
        if bytes_.below(8):
            body = mutate_json(body, bytes_)
            body = body if isinstance(body, dict) else {"value": body}
            try:
                seal = digest(body)
            except Exception:  # it may hold half a character
                seal = None
            whole = {"format": f"fairpruner {kind}", "version": 1, **body, "digest": seal}
            path.write_text(json.dumps(whole))
        else:
            whole = {"format": f"fairpruner {kind}", "version": 1, **body, "digest": digest(body)}
            path.write_bytes(mutate_text(json.dumps(whole).encode(), bytes_))

    return write


def write_sealed_tensors(kind: str, make: Callable[[Path], None]) -> Callable[[Path, Bytes], None]:
    @cache
    def whole() -> bytes:
        with TemporaryDirectory() as folder:
            make(Path(folder) / "file")
            return (Path(folder) / "file").read_bytes()

    def write(path: Path, bytes_: Bytes) -> None:
        path.write_bytes(whole())
        if not bytes_.below(4):
            path.write_bytes(mutate_bytes(path.read_bytes(), bytes_))
            return
        metadata, tensors = read_all(path)
        content = json.loads(metadata["fairpruner"])
        body = {k: v for k, v in content.items() if k not in ("format", "version", "digest")}
        if bytes_.below(3):
            body = mutate_json(body, bytes_)
        if not isinstance(body, dict) or not bytes_.below(3):
            body = body if isinstance(body, dict) else {}
            name = bytes_.pick(sorted(tensors))
            types = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16)
            odd = torch.full((bytes_.below(4), 2), torch.nan, dtype=torch.float64)
            old = tensors[name]
            tensors[name] = bytes_.pick((odd, old.to(bytes_.pick(types)), old.flatten()[:1]))
        try:
            write_tensors(path, kind, body, {name: t.contiguous() for name, t in tensors.items()})
        except Exception:  # what cannot be written is no file
            path.write_bytes(b"")

    return write


def write_mutated(content: Callable[[], bytes], mutate: Callable[[bytes, Bytes], bytes]) -> Any:
    return lambda path, bytes_: path.write_bytes(mutate(content(), bytes_))


def write_json(content: Callable[[], Any]) -> Callable[[Path, Bytes], None]:
    def write(path: Path, bytes_: Bytes) -> None:
        if bytes_.below(4):
            path.write_text(json.dumps(mutate_json(content(), bytes_)))
        else:
            path.write_bytes(mutate_text(json.dumps(content()).encode(), bytes_))

    return write


def read_scores(path: Path) -> None:
    apply(fp.allocate(fp.Scores.load(path), keep=fp.Budget("units", 0.6)))


def use_table(path: Path) -> None:
    table = LatencyTable.load(path)
    table.milliseconds(np.array([[max(1, f.size // 2)] for f in table.factors]))


def use_numbers(path: Path) -> None:
    fp.report(made()[2], measured=path).to_json()


def read_index(path: Path) -> None:
    folder = path.parent
    path.rename(folder / "model.safetensors.index.json")
    assert all(file.parent == folder for file in shard_files(folder))


def tokenizer(texts: list[str], *more: Any, **_: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(len(texts), 2, dtype=torch.long)}


def read_texts(suffix: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        path = path.rename(path.with_name(f"file{suffix}"))
        list(load_text(path, tokenizer, Sampling(), Columns(label="label")))

    return read


def read_arrays(path: Path) -> None:
    list(load_data(str(path.rename(path.with_suffix(".npz"))), Sampling(), Preprocessing()))


def read_picture(path: Path) -> None:
    (path.parent / "class").mkdir()
    path.rename(path.parent / "class" / "a.png")
    list(load_data(str(path.parent), Sampling(), Preprocessing(size=8)))


def read_weights(suffix: str) -> Callable[[Path], None]:
    return lambda path: load_weights(Net(), path.rename(path.with_suffix(suffix)))


@cache
def folder_files() -> dict[str, bytes]:
    """A saved model: the name and content of each of its files."""
    net, plan, _ = made()
    with TemporaryDirectory() as folder:
        fp.save(fp.cut(net, plan), plan, Path(folder) / "small")
        return {file.name: file.read_bytes() for file in (Path(folder) / "small").iterdir()}


write_model_file = write_sealed_tensors("model", lambda path: _copy(path, "model.safetensors"))


def _copy(path: Path, name: str) -> None:
    path.write_bytes(folder_files()[name])


def write_folder(path: Path, bytes_: Bytes) -> None:
    path.mkdir()
    for name in folder_files():
        _copy(path / name, name)
    name = bytes_.pick(("plan.json", "model.safetensors", "report.json"))
    content = (path / name).read_bytes()
    if name == "model.safetensors":
        write_model_file(path / name, bytes_)
    elif bytes_.below(3):
        value = mutate_json(json.loads(content), bytes_)
        if isinstance(value, dict) and bytes_.below(2):
            value.pop("digest", None)
        (path / name).write_text(json.dumps(value))
    else:
        (path / name).write_bytes(mutate_text(content, bytes_))


def read_folder(path: Path) -> None:
    fp.report(path).to_json()
    loaded = fp.load(path, build=Net).double()
    assert loaded(EXAMPLE.double()).shape == (3, 3)


RUN = {"epochs": 2}


def write_checkpoint(path: Path) -> None:
    net = Net()
    content = {
        "epoch": 1,
        "position": 2,
        "tally": {"samples": 3, "loss": 1.0},
        "history": [{"number": 1, "learning_rate": 0.1, "loss": 0.5, "seconds": 1.0, "accuracy": None}],
        "best": 1,
        "optimizer": {"0/step": 3},
        "scaler": None,
    }
    tensors = {"model": dict(net.state_dict()), "best": {}, "optimizer": {}}
    save_checkpoint(Checkpoint(tensors, content), path.parent, RUN)
    (path.parent / "checkpoint.safetensors").rename(path)


def read_checkpoint(path: Path) -> None:
    path.rename(path.parent / "checkpoint.safetensors")
    load_checkpoint(path.parent, RUN, Net())


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 9, 7, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(range(27)) for _ in range(7))
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros((4, 3), np.float32), y=np.arange(4))
    return file.getvalue()


def checkpoint() -> bytes:
    file = io.BytesIO()
    torch.save({"state_dict": Net().state_dict()}, file)
    return file.getvalue()


@cache
def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [0, 1]}), file)
    return file.getvalue()


def weights() -> bytes:
    from safetensors.torch import save

    return save(dict(Net().state_dict()))


def table() -> Any:
    factors = (Factor(8, {"a": np.array([1, 1, 2])}), Factor(3, {}))
    ops = (TimedOp((0, 1), 0.5, 4.0, 1.0, (0.5, 0.1)), TimedOp((1,), 0.5, 0.2, 0.0, (0.5,)))
    return LatencyTable(factors, ops, 6.0, 4, "abc", {"batch": 1}, ((2.0, 2.1),)).to_json()


ROWS = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
LINES = b"\n".join(json.dumps(row).encode() for row in ROWS)
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "attn_implementation": "eager",
}
TARGETS: dict[str, Target] = {
    "plan": Target(write_sealed("plan", lambda: made()[1].to_json()), lambda path: apply(fp.Plan.load(path))),
    "scores": Target(write_sealed_tensors("scores", lambda path: made()[2].save(path)), read_scores),
    "latency": Target(write_sealed("latency table", table), use_table),
    "measured": Target(write_json(lambda: {"cut": {"accuracy": 0.9, "flops": 12}}), use_numbers),
    "folder": Target(write_folder, read_folder),
    "checkpoint": Target(write_sealed_tensors("checkpoint", write_checkpoint), read_checkpoint),
    "index": Target(write_json(lambda: {"weight_map": {"a": "model-1.safetensors"}}), read_index),
    "jsonl": Target(write_mutated(lambda: LINES, mutate_text), read_texts(".jsonl")),
    "csv": Target(write_mutated(lambda: b"text,label\na,0\nb,1\n", mutate_text), read_texts(".csv")),
    "xz": Target(write_mutated(lambda: lzma.compress(LINES), mutate_bytes), read_texts(".jsonl.xz")),
    "parquet": Target(write_mutated(parquet, mutate_bytes), read_texts(".parquet")),
    "npz": Target(write_mutated(npz, mutate_bytes), read_arrays),
    "png": Target(write_mutated(png, mutate_bytes), read_picture),
    "pt": Target(write_mutated(checkpoint, mutate_bytes), read_weights(".pt")),
    "safetensors": Target(write_mutated(weights, mutate_bytes), read_weights(".safetensors")),
    "configuration": Target(
        lambda path, bytes_: (path.mkdir(), write_json(lambda: CONFIG)(path / "config.json", bytes_))[0],
        lambda path: configuration(str(path)),
    ),
}


def run_case(name: str, data: bytes) -> str:
    """Write one mutant, read and use it: "accepted" or "refused"; other exceptions come out."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        TARGETS[name].write(path, Bytes(data))
        try:
            TARGETS[name].read(path)
        except fp.FairprunerError as error:
            refusal = str(error)
        else:
            return "accepted"
    assert len(refusal) < 3000, "an error that nobody reads to its end"
    return "refused"
