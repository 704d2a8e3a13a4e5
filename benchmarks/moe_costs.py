"""What a tiny Qwen2-MoE without half, 3/4 or 5/6 of its experts costs: bytes, memory, latency, energy.

Every block loses equally many experts, chosen by `reap` on 10,000 calibration tokens. Memory is that of a
process that loads the folder and runs one text of 128 tokens, above an idle one. `energy` needs CodeCarbon:

    pip install "fairpruner[hf,energy]"
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from nets import moe_models
from nets.moe_models import REMOVED, plan_for

import fairpruner as fp

HERE = Path(__file__).parent
FOLDER = {"disk": "size on disk", "resident": "resident memory to load and run"}
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    for removed in REMOVED[:1] if quick else REMOVED:
        yield {"removed": removed, "tokens": 10_000}


def measure(case: Row, shared: Path) -> Row:
    """The pruned model beside the full one."""
    model, example = moe_models.model(shared), moe_models.example(shared)
    plan = plan_for(moe_models.scores(shared, 0, case["tokens"]), "reap", "uniform", case["removed"])
    small = fp.cut(model, plan)
    costs = fp.measure(small, example, against=model, batch_sizes=(1,), memory=False, energy="DEU")
    with tempfile.TemporaryDirectory() as folder:
        full, pruned = Path(folder) / "full", Path(folder) / "small"
        fp.save(model, fp.Plan.removing(moe_models.experts(shared), {}), full)
        fp.save(small, plan, pruned)
        return {"folders": {"full": on_disk(full), "small": on_disk(pruned)}, **costs.to_json()}


def on_disk(folder: Path) -> Row:
    """Bytes of a folder's tensors, and the memory of a process of its own that loads and runs it."""
    script = f"import moe_costs; moe_costs.print_memory({str(folder)!r})"
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True)
    return {
        "disk": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "resident": int(done.stdout.split()[-1]),
    }


def print_memory(folder: str) -> None:
    """Peak bytes above those of this process before it loads the model."""
    import transformers

    idle = memory("VmRSS")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 128, dtype=torch.int64))
    print(memory("VmHWM") - idle)


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def page() -> str:
    """Costs by share removed, as Markdown."""
    stored = runs.stored("moe_costs")
    columns = [*(column(row, "against") for row in stored[:1]), *(column(row, "model") for row in stored)]
    title = (
        "What they cost: plans of equal depth, one text of 128 tokens; in brackets, how many times faster"
        " than the full model in the same run. Energy and CO2 are CodeCarbon's estimates, since this machine"
        " has no counter."
    )
    head = ["", "full", *(f"{row['removed']:.1%} removed" for row in stored)]
    names = list(columns[0]) if columns else []
    return f"{title}\n\n{pages.table(head, [[name, *(c[name] for c in columns)] for name in names])}"


def column(row: Row, side: str) -> dict[str, str]:
    """What was measured of one model, `side` being "model" (the pruned one) or "against" (the full one)."""
    shown = {
        f"{q['name']}, {q['unit']}" if q["unit"] else q["name"]: amount(q[side])
        for q in row["quantities"]
        if q["model"] is not None
    }
    sizes = row["folders"]["small" if side == "model" else "full"]
    shown |= {f"{what}, MB": f"{sizes[key] / 1e6:.1f}" for key, what in FOLDER.items()}
    for timing in row["timings"]:
        median = timing[side]["median"]
        faster = f" ({timing['against']['median'] / median:.2f} ×)" if side == "model" else ""
        shown[f"{timing['what']}, ms"] = f"{median:.2f}{faster}"
    return shown


def amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
