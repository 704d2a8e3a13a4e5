"""Kill, starve and break every stage that writes, and count what is lost: python benchmarks/faults.py

Each trial runs one stage in a process of its own, over outputs that are there already, and hurts it: SIGKILL
or SIGTERM at a random moment or at an aimed one (before a given call that flushes, renames or removes), a
full disk, a read-only folder, a loader or model that raises, a worker of a loader that dies. Then the old
outputs or the whole new ones must be there, the sources untouched, and the same command must succeed and
leave no stray file. Counts go to benchmarks/results/faults.json, where a stopped run goes on.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pages
import torch
import torchvision_shim  # noqa: F401  # so that transformers imports

import fairpruner as fp
from fairpruner.cli import app
from fairpruner.core import writing

RESULTS = Path(__file__).parent / "results" / "faults.json"
ENDINGS = {"score": ".safetensors", "plan": ".json"}
STAGES = ("score", "plan", "cut", "stream", "recover", "prune")
SPAWN = multiprocessing.get_context("fork")  # torch is imported once, and no thread of it runs yet
AIMED = (  # functions before whose n-th call a process is killed
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
    (writing, "_exchange"),
)
NET = """
import os
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if i == 40 and os.environ.get("FAULT") == "worker":
            os._exit(3)
        if i == 40 and os.environ.get("FAULT") == "loader":
            raise OSError("the disk of the data is gone")
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return (x * 40 if i == 40 else x), i % 4

def batches():
    workers = 1 if os.environ.get("FAULT") == "worker" else 0
    return torch.utils.data.DataLoader(Data(), 16, num_workers=workers)

class Breaks(nn.Linear):
    def forward(self, x):
        if os.environ.get("FAULT") == "model" and x.shape[0] > 1 and float(x.detach().abs().max()) > 30:
            raise ZeroDivisionError("in the middle of the forward pass")
        return super().forward(x)
"""


def prepare(place: Path) -> None:
    """A net, its data, a model of Hugging Face, and the outputs of an earlier run of every stage."""
    (place / "net.py").write_text(NET.replace("nn.Linear(8, 64)", "Breaks(8, 64)"))
    os.chdir(place)
    for stage in STAGES:
        assert run(command(stage)) == 0, (stage, (place / "output.txt").read_text())
    shutil.copytree(place / "outputs", place / "before")
    shutil.rmtree(place / "before" / "checkpoints")  # a recovery that is done would not train again


def command(stage: str) -> list[str]:
    data = ["--data", "net.py:batches"]
    out = [
        "-o",
        f"outputs/{stage}{'.safetensors' if stage == 'score' else '.json' if stage == 'plan' else ''}",
    ]
    commands = {
        "score": ["score", "net.py:build", *data, "--removal", "l1"],
        "plan": ["plan", "outputs/score.safetensors", "--keep", "flops=0.6"],
        "cut": ["cut", "net.py:build", "outputs/plan.json"],
        "stream": ["cut", "hf:whole", "stream.json", "--stream", "--max-shard-size", "40KB"],
        "recover": ["recover", "outputs/cut", "--model", "net.py:build", *data, "--epochs", "2"],
        "prune": ["prune", "net.py:build", *data, "--keep", "flops=0.7", "--removal", "l1"],
    }
    extra = ["--checkpoints", "outputs/checkpoints"] if stage == "recover" else []
    return [*commands[stage], *extra, *out, "--force"]


def whole_model(place: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(place / "whole")
    spaces = fp.discover(model, {"input_ids": torch.arange(6)[None]}, kinds=["hidden"])
    fp.Plan.removing(spaces, {s.name: range(9) for s in spaces}).save(place / "stream.json")


def run(arguments: list[str]) -> int:
    """The exit code of a command in a process of its own, minus the signal that ended it."""
    return finish(start(arguments))


def start(arguments: list[str], hurt: Callable[[], None] | None = None) -> Any:
    process = SPAWN.Process(target=work, args=(arguments, hurt))
    process.start()
    return process


def finish(process: Any) -> int:
    process.join(300)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("a command hangs")
    return int(process.exitcode)


def work(arguments: list[str], hurt: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(2, 1)
    if hurt is not None:
        hurt()
    app(arguments, prog_name="fairpruner")


# Faults


def aimed(number: int, target: int, what: signal.Signals) -> Callable[[], None]:
    """Be killed before the given call of a function that decides what is on the disk."""

    def hurt() -> None:
        module, name = AIMED[target]
        usual, calls = getattr(module, name), [0]

        def counting(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                os.kill(os.getpid(), what)
            return usual(*arguments, **options)

        setattr(module, name, counting)

    return hurt


def full_disk(limit: int) -> Callable[[], None]:
    """No file can grow beyond a limit, as on a disk without room."""

    def hurt() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return hurt


def no_room(after: int) -> Callable[[], None]:
    """From the given flush on, the disk says that it is full."""

    def hurt() -> None:
        usual, calls = os.fsync, [0]

        def flush(file: int) -> None:
            calls[0] += 1
            if calls[0] >= after:
                raise OSError(errno.ENOSPC, "No space left on device")
            usual(file)

        os.fsync = flush

    return hurt


def read_only() -> None:
    """No folder can be made among the outputs, as on a disk that is mounted read-only."""
    usual = os.mkdir

    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        if "outputs" in os.fspath(path):
            raise OSError(errno.EROFS, "Read-only file system")
        usual(path, *arguments, **options)

    os.mkdir = mkdir


def fault(name: str) -> Callable[[], None]:
    return lambda: os.environ.__setitem__("FAULT", name)


# Judging


def judge(stage: str, code: int, place: Path) -> Counter[str]:
    """What was found wrong after a trial; nothing in a good one."""
    wrong: Counter[str] = Counter()
    output = place / command(stage)[command(stage).index("-o") + 1]
    if not readable(stage, output):
        wrong["output lost or half-written"] += 1
    for name in ("net.py", "whole", "stream.json"):
        if not same(place / name, place / "sources" / name):
            wrong["source changed"] += 1
    text = (place / "output.txt").read_text(errors="replace")
    if "Traceback" in text:
        wrong["traceback"] += 1
    if code == 0:
        return wrong
    if run(command(stage)) != 0:
        wrong["next run fails"] += 1
    elif any(path.name.startswith((".fairpruner-", ".tmp")) for path in (place / "outputs").rglob("*")):
        wrong["stray file after the next run"] += 1
    return wrong


def readable(stage: str, output: Path) -> bool:
    try:
        if stage == "score":
            fp.Scores.load(output)
        elif stage == "plan":
            fp.Plan.load(output)
        else:
            fp.load(output, build=None if stage == "stream" else "net.py:build")
    except fp.FairprunerError:
        return False
    return True


def same(first: Path, second: Path) -> bool:
    if first.is_file():
        return first.read_bytes() == second.read_bytes()
    names = sorted(p.name for p in first.iterdir())
    return names == sorted(p.name for p in second.iterdir()) and all(
        (first / n).read_bytes() == (second / n).read_bytes() for n in names
    )


def restore(place: Path) -> None:
    shutil.rmtree(place / "outputs")
    shutil.copytree(place / "before", place / "outputs")


def kills(place: Path, number: int, results: dict[str, Any]) -> None:
    """Kills at random and aimed moments, over all stages in turn, on from those that were counted before."""
    took = {stage: seconds(stage, place) for stage in STAGES}
    done = sum(row["trials"] for name, row in results.items() if name.startswith("SIG"))
    for trial in range(done, number):
        rng = random.Random(trial)
        stage = STAGES[trial % len(STAGES)]
        what = signal.SIGTERM if trial // (2 * len(STAGES)) % 3 == 2 else signal.SIGKILL
        way = "aimed" if (trial // len(STAGES)) % 2 else "random"
        restore(place)
        if way == "aimed":
            hurt = aimed(1 + rng.randrange(4), rng.randrange(len(AIMED)), what)
            code = finish(start(command(stage), hurt))
        else:
            process = start(command(stage))
            time.sleep(rng.random() * took[stage])
            os.kill(process.pid, what)
            code = finish(process)
        row = results.setdefault(f"{what.name}, {way} moment", {"trials": 0, "ended by it": 0, "wrong": {}})
        row["trials"] += 1
        row["ended by it"] += code in (-what, 130)
        for name, times in judge(stage, code, place).items():
            row["wrong"][f"{stage}: {name}"] = row["wrong"].get(f"{stage}: {name}", 0) + times
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def seconds(stage: str, place: Path) -> float:
    restore(place)
    begin = time.monotonic()
    assert run(command(stage)) == 0
    return time.monotonic() - begin


def others(place: Path, results: dict[str, Any]) -> None:
    """Full disks, a read-only folder, and user code that fails midway; those not counted before."""
    faults: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
        "full disk, file size": (full_disk(2000), STAGES),
        "full disk, first flush": (no_room(1), STAGES),
        "full disk, third flush": (no_room(3), ("cut", "stream", "recover", "prune")),
        "read-only folder": (read_only, STAGES),
        "loader raises midway": (fault("loader"), ("score", "recover", "prune")),
        "worker of the loader dies": (fault("worker"), ("score", "recover", "prune")),
        "model raises midway": (fault("model"), ("score", "recover", "prune")),
    }
    for name, (hurt, stages) in faults.items():
        if name in results:
            continue
        row = results[name] = {"trials": 0, "one sentence, exit 1": 0, "wrong": {}}
        for stage in stages:
            restore(place)
            (place / "outputs").chmod(0o755)
            code = finish(start(command(stage), hurt))
            (place / "outputs").chmod(0o755)
            row["trials"] += 1
            row["one sentence, exit 1"] += code == 1 and told(place)
            for found, times in judge(stage, code, place).items():
                row["wrong"][f"{stage}: {found}"] = times
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def told(place: Path) -> bool:
    lines = (place / "output.txt").read_text(errors="replace").strip().splitlines()
    return bool(lines) and lines[-1].startswith("Error: ")


def page() -> str:
    """What each kind of fault lost, as Markdown."""
    results = pages.results("faults")
    rows = ["| fault | trials | ended by it | lost, broken or left over |", "|---|---|---|---|"]
    for name, row in results.items():
        ended = row.get("ended by it", row.get("one sentence, exit 1"))
        wrong = "; ".join(f"{what} {times}" for what, times in row["wrong"].items()) or "0"
        rows.append(f"| {name} | {row['trials']} | {ended} | {wrong} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--table", action="store_true", help="only write the table of docs/files.md")
    options = parser.parse_args()
    if options.table:
        pages.fill("faults", page())
        return
    with TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        place.chmod(0o755)
        whole_model(place)
        prepare(place)
        (place / "sources").mkdir()
        for name in ("net.py", "stream.json"):
            shutil.copy(place / name, place / "sources" / name)
        shutil.copytree(place / "whole", place / "sources" / "whole")
        results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        others(place, results)
        kills(place, options.kills, results)
        os.chdir("/")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    pages.fill("faults", page())
    sys.exit(any(row["wrong"] for row in results.values()))


if __name__ == "__main__":
    main()
