"""Parts of random networks that see a map as a sequence of its pixels: attention, recurrence, experts.

A part is built from the width of its maps and a small number, which also chooses between its forms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from random_parts import SIZE
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def as_tokens(x: Tensor) -> Tensor:
    """[batch, width, SIZE, SIZE] -> [batch, pixels, width]."""
    return x.flatten(2).transpose(1, 2)


def as_map(tokens: Tensor) -> Tensor:
    """The inverse of `as_tokens`."""
    return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, SIZE, SIZE)


class Attention(nn.Module):
    """Heads of width `size` over the pixels, by the fused kernel or by hand."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.query, self.keyvalue = nn.Linear(width, 3 * size), nn.Linear(width, 6 * size)
        self.leave = nn.Linear(3 * size, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        batch, length, _ = tokens.shape
        query = self.query(tokens).view(batch, length, -1, self.size).transpose(1, 2)
        key, value = self.keyvalue(tokens).view(batch, length, 2, -1, self.size).permute(2, 0, 3, 1, 4)
        if self.size % 2:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            mixed = (query @ key.transpose(2, 3) / self.size**0.5).softmax(-1) @ value
        mixed = self.leave(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + mixed.transpose(1, 2).reshape(x.shape)


class NamedHeads(nn.Module):
    """The count of heads stands in an attribute with a name of its own."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.how_many, self.per = 4, width // 4
        self.qkv, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        batch, length, _ = tokens.shape
        q, k, v = (
            part.view(batch, length, self.how_many, self.per).transpose(1, 2)
            for part in self.qkv(tokens).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        mixed = self.leave(mixed.reshape(batch, length, self.how_many * self.per))
        return x + mixed.transpose(1, 2).reshape(x.shape)


class GroupedHeads(nn.Module):
    """Two query heads for each key and value head, with norms inside a head and rotations by position."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.kernel, self.size = size % 2 == 0, 4
        self.query, self.key = nn.Linear(width, 16), nn.Linear(width, 8, bias=False)
        self.value, self.leave = nn.Linear(width, 8), nn.Linear(16, width)
        self.query_norm, self.key_norm = nn.RMSNorm(4), nn.LayerNorm(4)
        turns = torch.outer(torch.arange(SIZE * SIZE), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(turns), turns))

    def forward(self, x: Tensor) -> Tensor:
        tokens = as_tokens(x)
        query, key, value = (
            layer(tokens).unflatten(2, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = self.turned(self.query_norm(query)), self.turned(self.key_norm(key))
        if self.kernel:
            mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        else:
            key, value = (part.repeat_interleave(2, 1) for part in (key, value))
            mixed = (query @ key.mT).softmax(-1) @ value
        return x + as_map(self.leave(mixed.transpose(1, 2).flatten(2)))

    def turned(self, heads: Tensor) -> Tensor:
        """Each pair of numbers as a complex one, turned by its position."""
        pairs = torch.view_as_complex(heads.unflatten(3, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns.to(pairs.dtype)).flatten(3)


class Stock(nn.Module):
    """torch's own attention, alone or in a layer of an encoder."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.whole = size % 2 == 0
        self.body = (
            nn.TransformerEncoderLayer(width, 4, 3 * size, 0.0, batch_first=True, norm_first=size % 4 == 0)
            if self.whole
            else nn.MultiheadAttention(width, 4, batch_first=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = as_tokens(x)
        if self.whole:
            return as_map(self.body(tokens))
        return x + as_map(self.body(tokens, tokens, tokens, need_weights=False)[0])


class Positions(nn.Module):
    """A learned vector for every pixel, and one for each of a few kinds."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.place, self.kind = nn.Embedding(SIZE * SIZE, width), nn.Embedding(size, width)
        self.register_buffer("kinds", torch.arange(SIZE * SIZE) % size)
        self.up, self.down = nn.Linear(width, 2 * size), nn.Linear(2 * size, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = as_tokens(x) + self.place.weight + self.kind(self.kinds)
        return as_map(tokens + self.down(F.silu(self.up(tokens))))


class Recurrent(nn.Module):
    """The rows of a map, one after the other: LSTM, GRU or RNN with layers, directions and projections."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        kind = (nn.LSTM, nn.GRU, nn.RNN)[size % 3]
        both, self.packed = size in (3, 4), size in (4, 6)
        options = {"proj_size": 3} if size == 6 else {}
        self.body = kind(width, 4 + size, 1 + size % 2, bidirectional=both, batch_first=True, **options)
        self.leave = nn.Linear((3 if options else 4 + size) * (1 + both), width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(3).transpose(1, 2)
        if self.packed:
            lengths = [SIZE - number % SIZE for number in range(rows.shape[0])]
            packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            found = pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=SIZE)[0]
        else:
            found = self.body(rows)[0]
        return x + self.leave(found).transpose(1, 2)[..., None]


class Cells(nn.Module):
    """A recurrent cell called for each of a few columns, from a state of zeros."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.hidden = 3 + size
        self.cell = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)[size % 3](width, self.hidden)
        self.leave = nn.Linear(self.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for column in x.mean(2).unbind(2)[:3]:
            state = self.cell(column, state)
            found.append(self.leave(state[0] if isinstance(state, tuple) else state))
        return x + torch.stack(found, 2).repeat(1, 1, 2)[:, :, None]


class Routed(nn.Module):
    """Experts in a list, the best of which each pixel uses."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.top_k = 1 + size % 2
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, size), nn.GELU(), nn.Linear(size, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = as_tokens(x).flatten(0, 1)
        weights, chosen = self.router(flat).topk(self.top_k, dim=-1)
        weights, mixed = weights.softmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            if token.numel():
                mixed.index_add_(0, token, expert(flat[token]) * weights[token, rank, None])
        return x + as_map(mixed.unflatten(0, (x.shape[0], -1)))


SEQUENCE_PARTS: dict[str, Callable[[int, int], nn.Module]] = {
    "attention": Attention,
    "named_heads": NamedHeads,
    "grouped_heads": GroupedHeads,
    "stock": Stock,
    "positions": Positions,
    "recurrent": Recurrent,
    "cells": Cells,
    "routed": Routed,
}
