"""Prune a speech recogniser: waveforms in, logits for each frame out, trained with a CTC loss of your own.

python examples/speech.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp

LETTERS = 20  # 0 is CTC's blank


class Recogniser(nn.Module):
    """Strided convolutions over the waveform and two transformer layers; logits [N, frames, letters]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.frames = nn.Sequential(
            *(nn.Conv1d(1, 24, 16, stride=8), nn.GELU(), nn.Conv1d(24, width, 16, stride=8), nn.GELU())
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, LETTERS)

    def forward(self, waveform: Tensor) -> Tensor:
        frames = self.frames(waveform[:, None]).mT  # [N, T, width]
        for layer in self.layers:
            frames = layer(frames)
        logits: Tensor = self.head(frames)
        return logits


def ctc(logits: Tensor, texts: Tensor) -> Tensor:
    """The mean CTC loss of texts [N, letters], padded with 0."""
    lengths = torch.full((len(logits),), logits.shape[1])
    return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), texts, lengths, (texts > 0).sum(1))


def main() -> None:
    torch.manual_seed(0)
    model = Recogniser().eval()
    waveforms, texts = torch.randn(16, 1600), torch.randint(1, LETTERS, (16, 5))
    data = list(zip(waveforms.split(4), texts.split(4), strict=True))

    scores = fp.score(model, data, loss=ctc, removal="activation")
    without_texts = fp.score(model, list(waveforms.split(4)))  # recordings alone are enough
    print(without_texts.settings["why"])
    plan = fp.allocate(scores, keep=fp.Budget("params", 0.6))
    small = fp.cut(model, plan)
    print(f"{plan.share('params'):.0%} of the parameters, logits {list(small(waveforms[:1]).shape)}")


if __name__ == "__main__":
    main()
