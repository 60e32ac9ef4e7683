"""torch_geometric."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("torch_geometric", needs=("yacs",))


def graphgym_gnn() -> Any:
    """GraphGymModule."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import create_model
    from torch_geometric.loader import DataLoader

    set_cfg(cfg)
    cfg.accelerator = "cpu"
    cfg.dataset.task, cfg.dataset.task_type, cfg.model.type = "graph", "classification", "gnn"
    cfg.gnn.dim_inner, cfg.gnn.layers_mp, cfg.gnn.dropout = 16, 2, 0.1
    cfg.gnn.head, cfg.optim.max_epoch = "graph", 3
    draw = torch.Generator().manual_seed(0)
    graphs = [
        Data(
            x=torch.randn(6, 4, generator=draw),
            edge_index=torch.randint(6, (2, 12), generator=draw),
            y=torch.randint(3, (1,), generator=draw),
        )
        for _ in range(40)
    ]
    module = create_model(to_device=False, dim_in=4, dim_out=3)
    return module, DataLoader(graphs[:32], batch_size=8), DataLoader(graphs[32:], batch_size=8)
