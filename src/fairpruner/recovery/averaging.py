"""The exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def ema_of(model: nn.Module, decay: float) -> AveragedModel:
    """An average that starts at the model's weights: average = decay · average + (1 - decay) · weights.

    Floating-point buffers, such as the statistics of norms, are averaged too. Integer buffers are copied.

    >>> import torch
    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(net.weight, 2.0)
    >>> average = ema_of(net, decay=0.75)
    >>> _ = nn.init.constant_(net.weight, 4.0)
    >>> average.update_parameters(net)
    >>> average.module.weight.item()
    2.5
    """
    average_floats = get_ema_multi_avg_fn(decay)

    def update(averages: list[Tensor], current: list[Tensor], count: Tensor | int) -> None:
        if averages[0].is_floating_point():  # torch passes tensors grouped by dtype
            average_floats(averages, current, count)
        else:
            # torch averages integers too and truncates: with a decay of 0.9, constant indices change.
            for average, value in zip(averages, current, strict=True):
                average.copy_(value)

    averaged = AveragedModel(model, multi_avg_fn=update, use_buffers=True)  # type: ignore[arg-type]
    averaged.n_averaged += 1  # at 0, torch would replace the starting weights by the first update
    return averaged
