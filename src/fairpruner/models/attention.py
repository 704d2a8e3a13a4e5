"""`nn.MultiheadAttention` with fewer heads: a class that replaces the one of torch after a cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FewerHeadsAttention(nn.MultiheadAttention):
    """Attention whose heads keep their width when some of them are removed.

    torch's module computes the width from the embedding and the number of heads, so it cannot lose a head.
    After a cut the projections have `num_heads * head_dim` rows; it is called in the same way.
    """

    # The number of heads before all cuts, followed by the heads that are left; empty if none was cut.
    kept_heads: tuple[int, ...] = ()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that `nn.TransformerEncoderLayer` does not use its fused kernel.

        That kernel computes the width of a head from the embedding.
        """
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            return self._nested(query, need_weights, average_attn_weights)
        batched = query.ndim == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._project(query, key, value)  # each [batch, heads, tokens, head_dim]
        # With this hint torch's module reads no mask, unless it needs one for the padding or the weights.
        causal = is_causal and (attn_mask is None or (key_padding_mask is None and not need_weights))
        mask = self._mask(q, k, attn_mask, key_padding_mask, causal)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(2, 3) / self.head_dim**0.5  # [batch, heads, tokens, keys]
            weights = F.softmax(scores if mask is None else scores + mask, -1)
            out = F.dropout(weights, dropout) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        joined: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))  # [batch, tokens, embedding]
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return joined.squeeze(0), None if weights is None else weights.squeeze(0)
        return (joined if self.batch_first else joined.transpose(0, 1)), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        weights: list[Tensor] = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        if self.in_proj_weight is not None:
            weights = list(self.in_proj_weight.chunk(3))
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
        projected = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
        if self.bias_k is not None and self.bias_v is not None:
            projected[1:] = [
                torch.cat([x, bias.expand(len(x), 1, -1)], 1)
                for x, bias in zip(projected[1:], (self.bias_k, self.bias_v), strict=True)
            ]
        if self.add_zero_attn:
            projected[1:] = [F.pad(x, (0, 0, 0, 1)) for x in projected[1:]]
        return [x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected]

    def _mask(
        self, q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None, causal: bool
    ) -> Tensor | None:
        """The sum of all masks, to be added to the scores [batch, heads, tokens, keys]."""
        if mask is not None and mask.ndim == 3:
            mask = self._of_kept_heads(mask.unflatten(0, (len(q), -1)))
        if padding is not None:
            padding = padding[:, None, None, :]
        own_keys = (self.bias_k is not None) + self.add_zero_attn  # the last keys, which masks do not hide
        if own_keys:
            mask, padding = (None if part is None else F.pad(part, (0, own_keys)) for part in (mask, padding))
        if causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        added = [_as_added(part, q.dtype) for part in (mask, padding) if part is not None]
        return sum(added[1:], added[0]) if added else None

    def _of_kept_heads(self, mask: Tensor) -> Tensor:
        """The part of a mask [batch, heads, tokens, keys] for the heads that are left.

        A model that computes the mask may count the heads that are left, or lose them from its own weights.
        """
        if mask.shape[1] == self.num_heads:
            return mask
        heads, *kept = self.kept_heads or (self.num_heads,)
        if mask.shape[1] != heads:
            raise RuntimeError(
                f"The 3D attn_mask has {mask.shape[1]} masks for each sample, but should have {heads}, one"
                " for each head."
            )
        return mask[:, kept]

    def _nested(self, packed: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Self-attention between samples without their padding, as `nn.TransformerEncoder` packs them."""
        lengths = [len(sample) for sample in packed.unbind()]
        x = packed.to_padded_tensor(0.0)  # [batch, tokens, embedding]
        places = torch.arange(x.shape[1], device=x.device)
        padding = places >= torch.tensor(lengths, device=x.device)[:, None]
        out, weights = self.forward(x, x, x, padding, need_weights, average_attn_weights=average)
        rows = [sample[:length] for sample, length in zip(out, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows), weights


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: numbers stay, and bools become -inf where they are true."""
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


# Class -> the class that a cut gives its modules, so that they accept fewer heads.
FEWER_HEADS: dict[type[nn.Module], type[nn.Module]] = {nn.MultiheadAttention: FewerHeadsAttention}


def remember_heads(module: nn.Module, kept: Sequence[int], before: int) -> None:
    """Remember which of a module's heads, counted before all cuts, are left: masks may have numbers for all.

    >>> module = nn.MultiheadAttention(8, 4)
    >>> remember_heads(module, [0, 2, 3], before=4)
    >>> remember_heads(module, [1, 2], before=3)
    >>> module.kept_heads
    (4, 2, 3)
    """
    heads, *left = vars(module).get("kept_heads", (before, *range(before)))
    vars(module)["kept_heads"] = (heads, *(left[position] for position in kept))


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Inside, `nn.MultiheadAttention` modules compute plain products, which can be observed one by one.

    The stock function hides what its output projection reads.
    """
    stock = [module for module in model.modules() if type(module) is nn.MultiheadAttention]
    try:
        for module in stock:
            module.__class__ = FewerHeadsAttention
        yield
    finally:
        for module in stock:
            module.__class__ = nn.MultiheadAttention
