"""Sizes that a recurrent module shares between its layers and directions, and the attributes that count them.

`nn.LSTM`, `nn.GRU` and `nn.RNN` have one `hidden_size` for all layers and both directions, so unit j of the
space is hidden unit j of each of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.discovery.ids import as_ids
from fairpruner.discovery.recorder import Recorder, SizeAttribute
from fairpruner.discovery.shadow import extent

PROJECTED = "torch needs a hidden_size above the proj_size, so only projected units can be removed"


def tie_recurrent(recorder: Recorder, model: nn.Module) -> None:
    """Unite the hidden units of all layers and directions of every recurrent module that was called."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and recorder.met(module.parameters()):
            for attribute, tensors in _counted(module):
                columns = [_columns(recorder, tensor) for tensor in tensors]
                for other in columns[1:]:
                    recorder.ids.unite(columns[0], other)
                recorder.size_attributes.append(SizeAttribute(path, attribute, columns[0]))
                if attribute == "hidden_size" and isinstance(module, nn.LSTM) and module.proj_size:
                    recorder.ids.lock(columns[0], PROJECTED)


def _counted(module: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    """Each attribute with the weights whose columns it counts."""
    weights = dict(module.named_parameters())
    ih, hh, hr = (
        [p for name, p in weights.items() if name.startswith(f"weight_{kind}")] for kind in ("ih", "hh", "hr")
    )
    yield "input_size", ih[:1]  # of the first layer; other layers read what the layer before writes
    if hr:  # an LSTM with projections passes the projected state to the next step
        yield "hidden_size", hr
        yield "proj_size", hh
    else:
        yield "hidden_size", hh


def _columns(recorder: Recorder, weight: nn.Parameter) -> Ints:
    maps = recorder.named_shadow(weight).maps
    return next(as_ids(idmap) for idmap in maps if extent(idmap)[1])
