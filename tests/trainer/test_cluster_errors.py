"""Environments that contradict themselves are one line."""

import pytest
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch import cluster

from cluster_environments import (
    BATCH,
    HOROVODRUN,
    HYDRA,
    LAUNCHED,
    MPIRUN,
    ON_EACH_NODE,
    STEP,
    Variables,
)


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (
            {"TRAINER_CLUSTER": "srum"},
            "TRAINER_CLUSTER=srum: no such source; did you mean 'srun'?",
        ),
        (
            {"TRAINER_CLUSTER": "xyz"},
            "TRAINER_CLUSTER=xyz: no such source; "
            "known: deepspeed, environment, horovod, hydra, nodes, none, openmpi, srun, "
            "torchelastic",
        ),
        (
            {"TRAINER_CLUSTER": "torchelastic"},
            "TRAINER_CLUSTER=torchelastic: its variables are not set here",
        ),
        (
            BATCH | {"TRAINER_CLUSTER": "srun"},
            "TRAINER_CLUSTER=srun: its variables are not set here",
        ),
        (
            {"TRAINER_CLUSTER": "environment", "RANK": "0"},
            "TRAINER_CLUSTER=environment: its variables are not set here",
        ),
        (
            {"TRAINER_CLUSTER": "environment", "RANK": "0", "WORLD_SIZE": "2"},
            "environment: MASTER_ADDR is not set; the launch is broken",
        ),
        (
            {"SLURM_STEP_ID": "0"},
            "srun: SLURM_NODEID is not set; the launch is broken",
        ),
        (
            STEP | {"SLURM_NODEID": "2"},
            "srun: SLURM_NODEID=2 of 2 nodes, but the step has 2 nodes "
            "(SLURM_STEP_TASKS_PER_NODE=2(x2)); the launch is broken",
        ),
        *(
            (
                STEP | {"SLURM_STEP_TASKS_PER_NODE": forged},
                f"srun: SLURM_NODEID=1 of 2 nodes, but the step has {nodes} nodes "
                f"(SLURM_STEP_TASKS_PER_NODE={forged}); the launch is broken",
            )
            for forged, nodes in (("1(x999999999)", 999999999), ("2(x-5)", -5), ("2", 1))
        ),
        (
            LAUNCHED | {"LOCAL_WORLD_SIZE": "0"},
            "environment: LOCAL_WORLD_SIZE=0, but it is the number of processes on this node, at "
            "least 1; the launch is broken",
        ),
        (
            LAUNCHED | {"LOCAL_RANK": "2"},
            "environment: rank 1 of 2, local rank 2 of 2, node 0 of 1 (counted from 0) are "
            "impossible (at most 1048576 processes); the launch is broken",
        ),
        (
            MPIRUN,
            "openmpi: 2 nodes, but the address of rank 0 is unknown; start them with "
            "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500",
        ),
        *(
            (
                {name: value for name, value in ON_EACH_NODE.items() if name != missing},
                f"nodes: {missing} is not set; a command that is started once on each node needs "
                "NODE_RANK, MASTER_ADDR, MASTER_PORT and NUM_NODES (or num_nodes of the trainer); "
                "set TRAINER_CLUSTER=none to ignore them",
            )
            for missing in ON_EACH_NODE
        ),
        (
            ON_EACH_NODE | {"LOCAL_RANK": "1"},
            "nodes: LOCAL_RANK=1, but neither RANK nor WORLD_SIZE; start the command once on each "
            "node without LOCAL_RANK, or set all three for each process",
        ),
        (
            ON_EACH_NODE | {"NODE_RANK": "2"},
            "nodes: rank 2 of 2, local rank 0 of 1, node 2 of 2 (counted from 0) are impossible "
            "(at most 1048576 processes); the launch is broken",
        ),
        (
            HYDRA,
            "hydra: the address of rank 0 is unknown; start the ranks with "
            "mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500",
        ),
        (
            HOROVODRUN | {"HOROVOD_SIZE": "3"},
            "horovod: rank 3 of 3 is 1 of 2 on its node, one of 2; start as many processes on each "
            "node, and fill one node after the other",
        ),
        (
            LAUNCHED | {"RANK": "one"},
            "environment: RANK='one' is not a number; the launch is broken",
        ),
    ],
)
def test_a_broken_environment_is_one_line(environment: Variables, line: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        cluster.detect(environment)
    assert raised.value.problems == [line]
