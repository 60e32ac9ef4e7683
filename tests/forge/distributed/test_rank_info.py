"""Which process of how many this is: torchrun's variables, SLURM's, or neither."""

from __future__ import annotations

import pytest

from forge.distributed.rank_info import PORTS, RankInfo, first_host
from forge.errors import ForgeError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "node[017-020,031]",
}


def test_without_any_of_them_it_is_one_process() -> None:
    assert RankInfo.read({}) == RankInfo(0, 1, 0, None)


def test_torchruns_variables_are_read() -> None:
    assert RankInfo.read(TORCHRUN) == RankInfo(3, 8, 1, "node1", 29400)


def test_sruns_variables_are_read() -> None:
    setting = RankInfo.read(SLURM)
    assert (setting.rank, setting.world, setting.local_rank, setting.address) == (5, 16, 1, "node017")
    assert setting.port == PORTS[123456 % len(PORTS)]


def test_torchrun_inside_a_slurm_job_comes_first() -> None:
    assert RankInfo.read({**SLURM, **TORCHRUN}).world == 8


def test_a_job_script_without_srun_is_one_process() -> None:
    assert RankInfo.read({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}).world == 1


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu7", "gpu7"), ("a1,b2", "a1"), ("node[017-020]", "node017"), ("n[3,5],m1", "n3")]
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_what_is_missing_or_no_number_is_named() -> None:
    with pytest.raises(ForgeError, match="sets RANK but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        RankInfo.read({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ForgeError, match="RANK is 'one'; it must be a whole number"):
        RankInfo.read({**TORCHRUN, "RANK": "one"})
