"""Graph networks of PyTorch Geometric for the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, PNA, GraphSAGE, global_mean_pool


class Classifier(nn.Module):
    """A network of graph convolutions, pooled over its nodes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(24, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        batch = torch.zeros(len(x), dtype=torch.int64)
        return self.head(global_mean_pool(self.body(x, edge_index), batch))


def graph() -> tuple[Tensor, Tensor]:
    """12 nodes with 8 features, each with edges to the next and to the third after it."""
    nodes = torch.arange(12)
    edges = torch.cat([torch.stack([nodes, (nodes + step) % 12]) for step in (1, 3)], 1)
    return torch.randn(12, 8), edges


def _made(kind: Any, **options: Any) -> tuple[Callable[[], nn.Module], Callable[[], Any]]:
    return lambda: Classifier(kind(8, 16, 2, 24, **options)), graph


GRAPHS = {
    "gcn": _made(GCN),
    "graphsage": _made(GraphSAGE),
    "gin": _made(GIN),
    "gat": _made(GAT, heads=4),
    "gatv2": _made(GAT, heads=4, v2=True),
    "pna": _made(PNA, aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([0, 0, 12])),
}
