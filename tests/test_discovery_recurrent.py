"""Hidden units of recurrent networks, and of what comes before them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import check_cut, some_units, with_lively_weights
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fairpruner as fp


class Tagger(nn.Module):
    """Embedding, a recurrent module, a head for each token: [batch, tokens] -> [batch, tokens, 3]."""

    def __init__(self, recurrent: Callable[[int], nn.Module], *, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.embed, self.recurrent = nn.Embedding(20, 10), recurrent(10)
        width = (getattr(self.recurrent, "proj_size", 0) or self.recurrent.hidden_size) * (
            1 + self.recurrent.bidirectional
        )
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.packed:
            lengths = torch.arange(tokens.shape[1], tokens.shape[1] - tokens.shape[0], -1)
            x = pack_padded_sequence(x, lengths, batch_first=True)
        x = self.recurrent(x)[0]
        return self.head(pad_packed_sequence(x, batch_first=True)[0] if self.packed else x)


FORMS: dict[str, tuple[Callable[[int], nn.Module], dict[str, int]]] = {
    "lstm": (lambda w: nn.LSTM(w, 8, batch_first=True), {"recurrent": 8}),
    "gru": (lambda w: nn.GRU(w, 8, batch_first=True), {"recurrent": 8}),
    "rnn": (lambda w: nn.RNN(w, 8, batch_first=True, nonlinearity="relu"), {"recurrent": 8}),
    "two layers": (lambda w: nn.LSTM(w, 8, 2, batch_first=True), {"recurrent": 8}),
    "both directions": (lambda w: nn.GRU(w, 8, bidirectional=True, batch_first=True), {"recurrent": 8}),
    "two layers, both directions": (
        lambda w: nn.LSTM(w, 8, 2, bidirectional=True, batch_first=True),
        {"recurrent": 8},
    ),
    "no bias": (lambda w: nn.LSTM(w, 8, bias=False, batch_first=True), {"recurrent": 8}),
    "projections": (
        lambda w: nn.LSTM(w, 8, 2, proj_size=5, batch_first=True),
        {"recurrent#2": 5},
    ),
}
TOKENS = torch.arange(10).reshape(2, 5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("form", FORMS)
def test_hidden_units_of_recurrent_modules(form: str) -> None:
    build, expected = FORMS[form]
    model = with_lively_weights(Tagger(build))
    spaces = fp.discover(model, TOKENS)
    assert {s.name: s.size for s in spaces} == {"embed": 10, **expected}
    small = check_cut(model, TOKENS, spaces, some_units(spaces, 0.5, 0))
    assert small.recurrent.input_size == 5
    if form == "projections":
        assert "above the proj_size" in spaces.left_out["recurrent"]
        assert (small.recurrent.hidden_size, small.recurrent.proj_size) == (8, 3)
    else:
        assert small.recurrent.hidden_size == 4


@pytest.mark.parametrize("form", ["lstm", "two layers, both directions"])
def test_packed_sequences(form: str) -> None:
    model = with_lively_weights(Tagger(FORMS[form][0], packed=True))
    spaces = fp.discover(model, TOKENS)
    assert {s.name: s.size for s in spaces} == {"embed": 10, "recurrent": 8}
    check_cut(model, TOKENS, spaces, some_units(spaces, 0.5, 0))


class Stepwise(nn.Module):
    """A cell called step by step, its states made by the cell, [batch, steps, 4] -> [batch, 2]."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.enter, self.cell, self.head = nn.Linear(4, 6), cell(6, 9), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in torch.tanh(self.enter(x)).unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell: type[nn.RNNCellBase]) -> None:
    model = with_lively_weights(Stepwise(cell))
    example = torch.randn(3, 4, 4, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert {s.name: s.size for s in spaces} == {"enter": 6, "cell": 9}
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


def test_convolutions_before_a_recurrent_module_are_free() -> None:
    class Crnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.recurrent, self.head = nn.LSTM(6 * 4, 8, bidirectional=True), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = torch.relu(self.norm(self.conv(x))).flatten(1, 2).permute(2, 0, 1)
            return self.head(self.recurrent(features)[0])

    model, example = with_lively_weights(Crnn()), torch.randn(2, 1, 4, 7, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert {s.name: s.size for s in spaces} == {"conv": 6, "recurrent": 8}
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


class ConvLSTM(nn.Module):
    """Own code in which convolutions compute the gates of every step, [batch, frames * 3, height, width]."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(3 + hidden, 4 * hidden, 3, padding=1)
        self.head = nn.Conv2d(hidden, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (2, 3))  # two frames
        state = cell = x.new_zeros(x.shape[0], self.hidden, *x.shape[-2:])
        for frame in x.unbind(1):
            stacked = self.gates(torch.cat([frame, state], 1))
            enter, forget, leave, new = stacked.chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
        return self.head(state)


def test_a_recurrent_network_of_one_s_own_is_found() -> None:
    model, example = with_lively_weights(ConvLSTM()), torch.randn(2, 6, 8, 8, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert [(space.name, space.size) for space in spaces] == [("gates", 8)]
    check_cut(model, example, spaces, {"gates": (0, 3, 5)})
