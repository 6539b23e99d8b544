"""Which process of how many this is, from the variables of every launcher: golden answers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from trainwright.core.errors import ConfigurationError
from trainwright.core.process import check_address, detect
from trainwright.processes.process_group import ProcessGroup

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[017-018]", "SLURM_JOB_NAME": "train",
}  # fmt: skip
SBATCH = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID")}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
_GOLDEN: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "nothing": ({}, {"launcher": "none", "world_size": 1, "rank": 0, "evidence": ()}),
    "torchrun on two nodes": (
        TORCHRUN,
        {
            "launcher": "torchrun", "rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 1,
            "num_nodes": 2, "master_addr": "10.0.0.1", "master_port": 29400,
        },
    ),
    "bare RANK and WORLD_SIZE, as some clusters set": (
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"launcher": "torchrun", "rank": 1, "local_rank": 1, "local_world_size": 2, "num_nodes": 1},
    ),
    "srun on two nodes": (
        SRUN,
        {
            "launcher": "slurm", "rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 1,
            "num_nodes": 2, "master_addr": "gpu017", "master_port": 15000 + 12345,
        },
    ),
    "srun with an address of its own": (
        {**SRUN, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "1234"},
        {"master_addr": "10.1.1.1", "master_port": 1234},
    ),
    "srun of fewer tasks than the job has": (
        {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"},
        {"launcher": "slurm", "world_size": 2, "num_nodes": 1, "local_world_size": 2},
    ),
    "python in an sbatch script, without srun": (SBATCH, {"launcher": "none", "world_size": 1, "rank": 0}),
    "an interactive shell by srun --pty": (
        {**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "38123"},
        {"launcher": "none", "world_size": 1},
    ),
    "torchrun inside srun": ({**SRUN, **TORCHRUN}, {"launcher": "torchrun", "rank": 5, "world_size": 8}),
    "Open MPI": (
        OPEN_MPI,
        {
            "launcher": "mpi", "rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 1,
            "num_nodes": 2, "master_addr": "10.0.0.1", "master_port": 29400,
        },
    ),
    "Intel MPI": (INTEL_MPI, {"launcher": "mpi", "rank": 5, "local_rank": 1, "num_nodes": 2, "master_addr": None}),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "expected"), _GOLDEN.values(), ids=_GOLDEN.keys())
def test_the_place_is_read_from_the_launchers_variables(environ: dict[str, str], expected: dict[str, Any]) -> None:
    found = detect("auto", environ)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("changed", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "-2"}], ids=str)
def test_variables_that_contradict_each_other_are_an_error(changed: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="contradict"):
        detect("auto", {**TORCHRUN, **changed})


def test_a_missing_master_addr_is_an_error() -> None:
    lost = detect("auto", {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigurationError, match="the variable MASTER_ADDR is not set"):
        ProcessGroup(lost, timeout=timedelta(seconds=1)).open(torch.device("cpu"))
    check_address(detect("auto", {"RANK": "0", "WORLD_SIZE": "1"}))
    check_address(detect("auto", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}))
    place = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    check_address(detect("auto", place))  # one machine
    with pytest.raises(ConfigurationError, match="the variable MASTER_ADDR is not set"):
        check_address(detect("auto", {**place, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}))


def test_a_variable_that_is_no_number_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigurationError, match="WORLD_SIZE='many'"):
        detect("auto", {**TORCHRUN, "WORLD_SIZE": "many"})
