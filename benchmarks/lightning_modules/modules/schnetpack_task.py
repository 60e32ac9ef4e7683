"""schnetpack: AtomisticTask with a SchNet."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("schnetpack")


def make() -> Any:
    import schnetpack as spk
    import torch
    from schnetpack.task import AtomisticTask, ModelOutput
    from torch.utils.data import DataLoader

    from benchmarks.lightning_modules.draw import numbers

    radial = spk.nn.GaussianRBF(n_rbf=8, cutoff=5.0)
    schnet = spk.representation.SchNet(16, 2, radial, spk.nn.CosineCutoff(5.0))
    energy = spk.atomistic.Atomwise(n_in=16, output_key="energy")
    model = spk.model.NeuralNetworkPotential(schnet, [spk.atomistic.PairwiseDistances()], [energy])
    output = ModelOutput("energy", loss_fn=torch.nn.MSELoss(), metrics={})
    module = AtomisticTask(model, [output], torch.optim.AdamW, {"lr": 1e-2})

    def molecules(count: int, seed: int) -> Any:
        pairs = torch.combinations(torch.arange(4), 2)
        pairs = torch.cat([pairs, pairs.flip(1)])
        found = []
        for place in numbers(count, 8, 4, 3, seed=seed):
            whole = torch.cat([pairs + 4 * k for k in range(8)])
            found.append(
                {
                    "_n_atoms": torch.full((8,), 4),
                    "_atomic_numbers": torch.tensor([6, 1, 8, 7] * 8),
                    "_positions": place.reshape(-1, 3),
                    "_idx_i": whole[:, 0],
                    "_idx_j": whole[:, 1],
                    "_offsets": torch.zeros(len(whole), 3),
                    "_idx_m": torch.arange(8).repeat_interleave(4),
                    "energy": place.sum((1, 2)),
                }
            )
        return DataLoader(found, batch_size=None)

    return module, molecules(6, 0), molecules(2, 1)
