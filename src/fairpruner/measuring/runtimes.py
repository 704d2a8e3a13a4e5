"""Runtimes: each turns a model and an example into a call without arguments.

To add a runtime, add an entry to RUNTIMES.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fairpruner.errors import FairprunerError, unknown
from fairpruner.measuring.timing import Inference
from fairpruner.models.calling import call_directly, copied, tensors_of
from fairpruner.models.copying import deep_copy
from fairpruner.models.devices import wait_for_model
from fairpruner.models.torch_private import tree_map_only

Prepare = Callable[[nn.Module, Any, int], Inference]  # (model in eval mode, example, threads)


def _eager(model: nn.Module, example: Any, threads: int) -> Inference:
    own = copied(example)

    def run() -> Any:
        output = call_directly(model, own)
        wait_for_model(model)
        return output

    return run


def _compile(model: nn.Module, example: Any, threads: int) -> Inference:
    torch.compiler.reset()  # otherwise torch.compile treats the third width of one class as a dynamic shape
    run = _eager(torch.compile(model), example, threads)  # type: ignore[arg-type]
    run()
    return run


def _onnxruntime(model: nn.Module, example: Any, threads: int) -> Inference:
    library = importlib.import_module("onnxruntime")
    importlib.import_module("onnxscript")  # the exporter needs it; imported here for a clear error
    model, example = _on_cpu(model, example)
    program = torch.onnx.export(model, **_arguments(example), dynamo=True, verbose=False)
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    content = program.model_proto.SerializeToString()  # type: ignore[union-attr]
    session = library.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    inputs = {
        given.name: tensor.numpy()
        for given, tensor in zip(session.get_inputs(), tensors_of(example), strict=True)
    }
    return lambda: session.run(None, inputs)


def _on_cpu(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """Both on the CPU, where these runtimes run: the given ones, or copies."""
    if all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers(), *tensors_of(example))):
        return model, example
    return deep_copy(model).cpu(), tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), example)


def _openvino(model: nn.Module, example: Any, threads: int) -> Inference:
    library = importlib.import_module("openvino")
    model, example = _on_cpu(model, example)
    converted = library.convert_model(exported(model, example))
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # the default is bfloat16 on processors that have it
    }
    compiled = library.Core().compile_model(converted, "CPU", options)
    inputs = [tensor.numpy() for tensor in tensors_of(example)]
    return lambda: list(compiled(inputs).values())


RUNTIMES: dict[str, Prepare] = {
    "eager": _eager,
    "compile": _compile,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
"""Runtime by name: a function from model, example and threads to a call without arguments."""


def check_runtime(name: str) -> None:
    """Refuse an unknown runtime."""
    if name not in RUNTIMES:
        raise unknown("runtime", name, RUNTIMES)


def prepared(runtime: str, model: nn.Module, example: Any, threads: int) -> Inference:
    """The call to time; a FairprunerError if the runtime is not installed or cannot run the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # exporters print deprecation warnings about themselves
            return RUNTIMES[runtime](model, example, threads)
    except ModuleNotFoundError as error:
        raise FairprunerError(
            f"{runtime} needs a package that is not installed: pip install {error.name}."
        ) from error
    except Exception as error:  # exporters and compilers raise exceptions of many classes
        lines = str(error).strip().splitlines() or [""]
        raise FairprunerError(
            f"{runtime} cannot run {type(model).__name__}: {type(error).__name__}: {lines[0]}"
        ) from error


def exported(model: nn.Module, example: Any) -> torch.export.ExportedProgram:
    """The program that `torch.export` makes of the model, called with the example."""
    arguments = _arguments(example)
    return torch.export.export(model, arguments["args"], arguments["kwargs"])


def _arguments(example: Any) -> dict[str, Any]:
    """An example as positional and keyword arguments."""
    if hasattr(example, "items"):
        return {"args": (), "kwargs": dict(example)}
    return {"args": tuple(example) if isinstance(example, (tuple, list)) else (example,), "kwargs": {}}
