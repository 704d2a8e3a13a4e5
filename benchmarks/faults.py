"""Kill, starve and break every stage that writes, and count what is lost.

Each trial runs one stage in a process of its own, over outputs that are there already, and hurts it: SIGKILL,
SIGTERM or SIGINT at a random moment or at an aimed one (before one of the calls that flush, rename or remove
files), a full disk, a read-only folder, a loader, loss or model that raises, a worker of a loader that dies.
Then the old outputs or the whole new ones must be there, the sources untouched, and the same command must
succeed and leave no stray file. A kill counts only if it ended the process.
"""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import harness.torchvision_shim  # noqa: F401 (transformers imports torchvision)
import torch
from harness import pages, runs

import fairpruner as fp
from fairpruner.__main__ import main as main_of_the_command
from fairpruner.core import writing
from fairpruner.inputs.sources import factory_of

OUTPUTS = {
    "score": "outputs/score.safetensors",
    "plan": "outputs/plan.json",
    **{stage: f"outputs/{stage}" for stage in ("cut", "stream", "save", "recover", "prune")},
}
STAGES = tuple(OUTPUTS)
KILLS = {"SIGKILL": 14, "SIGTERM": 4, "SIGINT": 3}  # of a row
ROUNDS = 2  # of kills; the first is older, and some of its rows have one kill more
MOMENTS = (0, 40, 63)  # samples at which the user's code fails
SPAWN = multiprocessing.get_context("fork")  # torch is imported once, and no thread of it runs yet
AIMED = (  # functions before whose n-th call a process is killed
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
    (writing, "_exchange"),
)
Row = dict[str, Any]
NET = """
import os
import torch
from torch import nn

def now(fault, sample):
    return os.environ.get("FAULT") == fault and os.environ.get("SAMPLE") == str(sample)

class Breaks(nn.Linear):
    def forward(self, x):
        marks = x.detach()[:, 0].tolist()
        if len(marks) > 1 and any(now("model", int(mark)) for mark in marks):
            raise ZeroDivisionError("in the middle of the forward pass")
        return super().forward(x)

def build():
    torch.manual_seed(0)
    return nn.Sequential(Breaks(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if now("worker", i):
            os._exit(3)
        if now("loader", i):
            raise OSError("the disk of the data is gone")
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        x[0] = i
        return x, i % 4

def batches():
    workers = 1 if os.environ.get("FAULT") == "worker" else 0
    return torch.utils.data.DataLoader(Data(), 16, num_workers=workers)

calls = [0]

def loss(output, labels):
    calls[0] += 1
    if os.environ.get("FAULT") == "loss" and calls[0] > int(os.environ["SAMPLE"]) // 16:
        raise ZeroDivisionError("in the middle of the loss")
    return nn.functional.cross_entropy(output, labels)
"""


def cases(quick: bool) -> Iterator[Row]:
    """Kills of every stage, then the other faults; a quick run has one stage."""
    for number in range(1 if quick else ROUNDS):
        for what in KILLS:
            for moment in ("random", "aimed"):
                for stage in ("plan",) if quick else STAGES:
                    yield {"fault": f"{what}, {moment} moment", "stage": stage, "round": number}
    for fault, (_, stages) in FAULTS.items():
        for stage in stages:
            if stage == "plan" or not quick:
                yield {"fault": fault, "stage": stage}


def measure(case: Row, shared: Path) -> Row:
    stage, place = case["stage"], prepared()
    if "round" in case:
        found = list(kills(case, place))
    else:
        found = [broken(stage, hurt, place) for hurt in FAULTS[case["fault"]][0]]
    return {"trials": len(found), "wrong": dict(sum(found, Counter()))}


@cache
def prepared() -> Path:
    """A folder with a net, its data, a model of Hugging Face, and the outputs of an earlier run of every
    stage. It becomes the working directory.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    place = Path(mkdtemp()).resolve()
    atexit.register(shutil.rmtree, place)
    place.chmod(0o755)
    whole_model(place)
    (place / "net.py").write_text(NET)
    os.chdir(place)
    for stage in STAGES:
        assert run(stage) == 0, (stage, (place / "output.txt").read_text())
    shutil.copytree(place / "outputs", place / "before")
    shutil.rmtree(place / "before" / "checkpoints")  # a recovery that is done would not train again
    (place / "sources").mkdir()
    for name in ("net.py", "stream.json"):
        shutil.copy(place / name, place / "sources" / name)
    shutil.copytree(place / "whole", place / "sources" / "whole")
    return place


def command(stage: str) -> list[str]:
    data = ["--data", "net.py:batches"]
    commands = {
        "score": ["score", "net.py:build", *data, "--removal", "l1", "--loss", "net.py:loss"],
        "plan": ["plan", "outputs/score.safetensors", "--keep", "flops=0.6"],
        "cut": ["cut", "net.py:build", "outputs/plan.json"],
        "stream": ["cut", "hf:whole", "stream.json", "--stream", "--max-shard-size", "40KB"],
        "recover": ["recover", "outputs/cut", "--model", "net.py:build", *data, "--epochs", "2"],
        "prune": ["prune", "net.py:build", *data, "--keep", "flops=0.7", "--removal", "l1"],
    }
    extra = ["--checkpoints", "outputs/checkpoints"] if stage == "recover" else []
    return [*commands[stage], *extra, "-o", OUTPUTS[stage], "--force"]


def save_from_python() -> None:
    """The stage that has no command: `fp.save` over an earlier folder."""
    plan = fp.Plan.load("outputs/plan.json")
    fp.save(fp.cut(factory_of("net.py:build")(), plan), plan, OUTPUTS["save"], force=True)


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


def run(stage: str) -> int:
    """The exit code of a stage in a process of its own, minus the signal that ended it."""
    return finish(start(stage))


def start(stage: str, hurt: Callable[[], None] | None = None) -> Any:
    process = SPAWN.Process(target=work, args=(stage, hurt))
    process.start()
    return process


def finish(process: Any) -> int:
    process.join(3600)  # on a busy machine a process with low priority waits for minutes
    if process.exitcode is None:
        process.kill()
        raise AssertionError("a command hangs")
    return int(process.exitcode)


def work(stage: str, hurt: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(2, 1)
    if hurt is not None:
        hurt()
    if stage != "save":
        sys.argv = ["fairpruner", *command(stage)]
        main_of_the_command()
    try:
        save_from_python()
    except fp.FairprunerError as error:
        print(f"Error: {error}", flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


# Faults


def aimed(number: int, target: int, what: signal.Signals) -> Callable[[], None]:
    """Be killed before the given call of a function that decides what is on the disk."""

    def kill(calls: int) -> None:
        if calls == number:
            os.kill(os.getpid(), what)

    return lambda: before_calls(target, kill)


def before_calls(target: int, act: Callable[[int], None]) -> None:
    """Have `act` called with the number of each call of a function, before it."""
    module, name = AIMED[target]
    usual, calls = getattr(module, name), [0]

    def counting(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        act(calls[0])
        return usual(*arguments, **options)

    setattr(module, name, counting)


@cache
def aims(stage: str, place: Path) -> list[tuple[int, int]]:
    """All calls before which a stage can be killed: the number of the call, and of the function."""
    counts = place / "calls.txt"

    def note(target: int, number: int) -> None:
        with counts.open("a") as file:
            file.write(f"{number} {target}\n")

    def hurt() -> None:
        for target in range(len(AIMED)):
            before_calls(target, partial(note, target))

    restore(place)
    counts.write_text("")
    assert finish(start(stage, hurt)) == 0
    return [(int(number), int(target)) for number, target in map(str.split, counts.read_text().splitlines())]


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


def fault(name: str, sample: int) -> Callable[[], None]:
    return lambda: os.environ.update(FAULT=name, SAMPLE=str(sample))


FOLDERS, READ_DATA = ("cut", "stream", "save", "recover", "prune"), ("score", "recover", "prune")
FAULTS: dict[str, tuple[list[Callable[[], None]], tuple[str, ...]]] = {  # with the stages that they can hurt
    "full disk, file size": ([full_disk(limit) for limit in (200, 1000)], STAGES),
    "full disk, first flush": ([no_room(1)], STAGES),
    "full disk, third flush": ([no_room(3)], FOLDERS),
    "read-only folder": ([read_only], STAGES),
    "loader raises midway": ([fault("loader", sample) for sample in MOMENTS], READ_DATA),
    "worker of the loader dies": ([fault("worker", sample) for sample in MOMENTS], READ_DATA),
    "loss raises midway": ([fault("loss", sample) for sample in MOMENTS], ("score",)),
    "model raises midway": ([fault("model", sample) for sample in MOMENTS], READ_DATA),
}


# Judging


def judge(stage: str, code: int, place: Path) -> Counter[str]:
    """What was found wrong after a trial; nothing in a good one."""
    wrong: Counter[str] = Counter()
    if not readable(stage, place / OUTPUTS[stage]):
        wrong["output lost or half-written"] += 1
    for name in ("net.py", "whole", "stream.json"):
        if not same(place / name, place / "sources" / name):
            wrong["source changed"] += 1
    text = (place / "output.txt").read_text(errors="replace")
    if "Traceback" in text:
        wrong["traceback"] += 1
    if code == 0:
        return wrong
    if run(stage) != 0:
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


def kills(case: Row, place: Path) -> Iterator[Counter[str]]:
    """What was found wrong after each kill, at random or aimed moments."""
    rng, stage = random.Random(str(case)), case["stage"]
    name, moment = case["fault"].split(", ")
    what, took, points = signal.Signals[name], seconds(stage, place), aims(stage, place)
    for _ in range(KILLS[name]):
        code = 0
        while code not in (-what, 130):
            restore(place)
            if moment == "aimed moment":
                code = finish(start(stage, aimed(*rng.choice(points), what)))
            else:
                process = start(stage)
                time.sleep(rng.random() * took)
                os.kill(process.pid, what)
                code = finish(process)
        yield judge(stage, code, place)


@cache
def seconds(stage: str, place: Path) -> float:
    restore(place)
    begin = time.monotonic()
    assert run(stage) == 0
    return time.monotonic() - begin


def broken(stage: str, hurt: Callable[[], None], place: Path) -> Counter[str]:
    """What was found wrong after a fault that the stage must report in one sentence."""
    restore(place)
    code = finish(start(stage, hurt))
    clear = code == 1 and told(place)
    wrong = judge(stage, code, place)
    if not clear:
        wrong["no sentence with exit 1"] += 1
    return wrong


def told(place: Path) -> bool:
    lines = (place / "output.txt").read_text(errors="replace").strip().splitlines()
    return bool(lines) and lines[-1].startswith("Error: ")


def page() -> str:
    """One row for each fault, as Markdown: trials by stage, and what was found wrong."""
    stored, lines = runs.stored("faults"), []
    for fault in sorted({row["fault"] for row in stored}):
        trials: Counter[str] = Counter()
        wrong: Counter[str] = Counter()
        for row in (row for row in stored if row["fault"] == fault):
            trials[row["stage"]] += row["trials"]
            wrong.update({f"{row['stage']}: {what}": times for what, times in row["wrong"].items()})
        lost = "; ".join(f"{what} {times}" for what, times in wrong.items()) or "0"
        lines.append([fault, *(str(trials[s] or "") for s in STAGES), str(trials.total()), lost])
    return pages.table(("fault", *STAGES, "all", "lost, broken or left over"), lines)
