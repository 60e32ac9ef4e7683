"""rl4co."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("rl4co")


def rl4co_attention() -> Any:
    """AttentionModel, trained by REINFORCE on a travelling salesman problem."""
    from rl4co.envs import TSPEnv
    from rl4co.models import AttentionModel

    policy = {"embed_dim": 16, "num_heads": 2, "num_encoder_layers": 1, "feedforward_hidden": 16}
    module = AttentionModel(
        TSPEnv(generator_params={"num_loc": 6}), baseline="no", policy_kwargs=policy, batch_size=8, train_data_size=32,
        val_data_size=8, test_data_size=8,
    )  # fmt: skip
    module.setup()
    return module, module.train_dataloader(), module.val_dataloader()
