"""Who a process is, read from environments as launchers set them."""

import pytest

from my_project.trainer.errors import ConfigurationError
from my_project.trainer.launch import cluster

Layout = cluster.Layout
Variables = dict[str, str]

# torchrun --nnodes 2 --nproc-per-node 2, the second process of the second node.
TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
    "RANK": "3",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}

# sbatch --nodes 2 --ntasks-per-node 2: what the batch script itself sees.
BATCH = {
    "SLURMD_NODENAME": "gpu07",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}

# srun in it: the first task of the second node.
STEP = BATCH | {
    "SLURMD_NODENAME": "gpu08",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}

# horovodrun --gloo -np 4 -H node-a:2,node-b:2, the second process of the second node.
HOROVODRUN = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_IFACE": "eth0",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.7",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "8756",
    "HOROVOD_HOSTNAME": "node-b",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "NCCL_SOCKET_IFNAME": "eth0",
}

# mpirun -H node-a:2,node-b:2 -np 4 of Open MPI 4.1, the second process of the second node.
MPIRUN = {
    "OMPI_APP_CTX_NUM_PROCS": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_MCA_ess_base_jobid": "712048641",
    "OMPI_MCA_ess_base_vpid": "3",
    "OMPI_MCA_orte_ess_node_rank": "1",
    "OMPI_MCA_orte_ess_num_procs": "4",
    "OMPI_MCA_orte_num_nodes": "2",
    "OMPI_MCA_orte_precondition_transports": "c25f2c07ec99154e-ddcf6e4fe97c0b67",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_HOSTNAME": "node-b",
    "PMIX_ID": "712048641.3",
    "PMIX_NAMESPACE": "712048641",
    "PMIX_RANK": "3",
}

# mpirun -np 2 of Open MPI 5.0 on one node, its second process.
MPIRUN_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_num_procs": "2",
    "OMPI_NUM_APP_CTX": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_HOSTNAME": "node-a",
    "PMIX_NAMESPACE": "prterun-node-a-18038@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}

# mpiexec.hydra -hosts node-a,node-b -ppn 2 -n 4 of MPICH 4.0, the second node's second process.
HYDRA = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node-b",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}

# What srun --mpi=pmi2 sets beside the step's own variables.
PMI2 = {"PMI_FD": "3", "PMI_JOBID": "4711.0", "PMI_RANK": "2", "PMI_SIZE": "4"}

# A command that somebody starts on each of two nodes: the second one.
ON_EACH_NODE = {
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "NODE_RANK": "1",
    "NUM_NODES": "2",
}

# deepspeed -H HOSTS of two nodes with two slots each: the second process of the second node.
DEEPSPEED = {
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "4",
}

# Where a launch on several nodes by mpirun is told that rank 0 is.
MASTER = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}

# What our own launcher sets for rank 1 of 2 on one node.
LAUNCHED = {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "51234",
    "RANK": "1",
    "WORLD_SIZE": "2",
}


def step_of(node: int, task: int, local: int) -> Variables:
    """srun -n 5 on 3 nodes: two tasks on each of the first two, one on the last."""
    return STEP | {
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(task),
        "SLURM_STEP_NODELIST": "gpu[09,11],login1",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    }


def test_torchrun() -> None:
    assert cluster.detect(TORCHRUN) == Layout(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        main_address="node-a",
        main_port=29400,
        source="torchelastic",
    )


def test_srun_step() -> None:
    assert cluster.detect(STEP) == Layout(
        rank=2,
        local_rank=0,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        main_address="gpu07",
        main_port=0,
        source="srun",
        launch_id="4711.0.0",
    )


def test_horovodrun() -> None:
    assert cluster.detect(HOROVODRUN) == Layout(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        main_address="10.0.0.7",
        main_port=0,
        source="horovod",
        launch_id="10.0.0.7-8756",
    )


def test_deepspeed() -> None:
    assert cluster.detect(DEEPSPEED) == Layout(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        main_address="node-a",
        main_port=29500,
        source="deepspeed",
    )


def test_deepspeed_wins_over_the_step_that_its_daemons_run_in() -> None:
    assert cluster.detect(STEP | DEEPSPEED).source == "deepspeed"


def test_deepspeed_on_nodes_of_different_size_is_refused() -> None:
    uneven = DEEPSPEED | {"WORLD_SIZE": "5", "RANK": "4", "LOCAL_SIZE": "3"}
    with pytest.raises(ConfigurationError, match="deepspeed: rank 4 of 5 is 1 of 3 on its node"):
        cluster.detect(uneven)


def test_mpirun() -> None:
    layout = cluster.detect(MPIRUN | MASTER)
    assert layout == Layout(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        main_address="node-a",
        main_port=29500,
        source="openmpi",
        launch_id="712048641-c25f2c07ec99154e-ddcf6e4fe97c0b67",
    )


def test_mpirun_of_open_mpi_5_on_one_node_needs_no_address() -> None:
    assert cluster.detect(MPIRUN_5) == Layout(
        rank=1,
        local_rank=1,
        world_size=2,
        local_world_size=2,
        node_rank=0,
        num_nodes=1,
        main_address="127.0.0.1",
        main_port=0,
        source="openmpi",
        launch_id="prterun-node-a-18038@1",
    )


def test_mpirun_of_open_mpi_5_on_several_nodes() -> None:
    more = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}
    layout = cluster.detect(MPIRUN_5 | MASTER | more)
    assert (layout.node_rank, layout.num_nodes) == (2, 3)


def test_hydra() -> None:
    assert cluster.detect(HYDRA | MASTER) == Layout(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        main_address="node-a",
        main_port=29500,
        source="hydra",
    )


def test_hydra_on_one_node_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.mpi, "_hydra_proxy", lambda: "hydra-node-a-123-4567")
    alone = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    layout = cluster.detect(HYDRA | alone)
    assert (layout.rank, layout.local_rank, layout.num_nodes) == (1, 1, 1)
    assert (layout.main_address, layout.main_port) == ("127.0.0.1", 0)
    assert layout.launch_id == "hydra-node-a-123-4567"
    monkeypatch.setattr(cluster.mpi, "_hydra_proxy", lambda: None)
    assert cluster.detect(HYDRA | alone | MASTER).main_port == 29500
    with pytest.raises(
        ConfigurationError, match="hydra: 1 node, but the address of rank 0 is unknown"
    ):
        cluster.detect(HYDRA | alone)


def test_srun_wins_over_hydra_where_it_has_started_the_ranks() -> None:
    """Its own plugins set PMI's variables; hydra inside a step sets more."""
    assert cluster.detect(STEP | PMI2).source == "srun"
    assert cluster.detect(STEP | HYDRA | MASTER).source == "hydra"
    assert cluster.detect(STEP | HYDRA | MASTER | MPIRUN).source == "openmpi"
    with pytest.raises(ConfigurationError, match="hydra: MPI_LOCALRANKID is not set"):
        cluster.detect(PMI2)  # not to train four times
    assert cluster.detect(PMI2 | {"PMI_RANK": "0", "PMI_SIZE": "1"}) == Layout()


@pytest.mark.parametrize("count", ["NUM_NODES", "NNODES", "num_nodes"])
def test_a_command_that_is_started_once_on_each_node(count: str) -> None:
    environment = {name: ON_EACH_NODE[name] for name in ON_EACH_NODE if name != "NUM_NODES"}
    given = 2 if count == "num_nodes" else None
    environment |= {} if given else {count: "2"}
    layout = cluster.detect(environment, num_nodes=given)
    assert layout == Layout(
        rank=1,
        world_size=2,
        node_rank=1,
        num_nodes=2,
        main_address="node-a",
        main_port=29500,
        source="nodes",
    )
    assert not layout.started_outside
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
    assert cluster.detect(environment | ranks, num_nodes=given).source == "environment"
    assert cluster.detect(environment | TORCHRUN, num_nodes=given).source == "torchelastic"


def test_one_node_alone_is_no_launch() -> None:
    assert cluster.detect(ON_EACH_NODE | {"NODE_RANK": "0", "NUM_NODES": "1"}) == Layout()
    assert cluster.detect(MASTER) == Layout()
    assert cluster.detect(MASTER | {"NNODES": "1"}) == Layout()


def test_horovodrun_on_one_node_is_led_from_loopback() -> None:
    alone = {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
    layout = cluster.detect(HOROVODRUN | alone | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})
    assert (layout.main_address, layout.num_nodes) == ("127.0.0.1", 1)


@pytest.mark.parametrize("environment", [HOROVODRUN, MPIRUN])
def test_an_address_and_a_port_that_are_set_win(environment: Variables) -> None:
    layout = cluster.detect(environment | MASTER)
    assert (layout.main_address, layout.main_port) == ("node-a", 29500)


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_size", "nodes"),
    [
        pytest.param(1, 0, 2, 2, id="two by node"),
        pytest.param(2, 1, 2, 2, id="two by node, and the first one's second rank"),
        pytest.param(0, 0, 2, 3, id="two, one and one"),
        pytest.param(3, 0, 1, 3, id="two, one and one, the last"),
    ],
)
def test_mpirun_that_does_not_fill_node_after_node_is_refused(
    rank: int, local_rank: int, local_size: int, nodes: int
) -> None:
    place = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_MCA_orte_num_nodes": str(nodes),
    }
    with pytest.raises(ConfigurationError, match="fill one node after the other"):
        cluster.detect(MPIRUN | MASTER | place)


def test_launches_of_the_same_batch_script_are_told_apart() -> None:
    again = {"OMPI_MCA_orte_precondition_transports": "a6b17c422adebdb9-972dcf078d8267ca"}
    launches = [
        STEP,
        STEP | {"SLURM_STEP_ID": "1"},
        STEP | {"SLURM_RESTART_COUNT": "1"},
        BATCH | MPIRUN | MASTER,
        BATCH | MPIRUN | MASTER | again,
        BATCH | MPIRUN_5,
        BATCH | HOROVODRUN,
    ]
    assert len({cluster.detect(launch).launch_id for launch in launches}) == len(launches)


@pytest.mark.parametrize(
    ("node", "task", "local", "on_this_node"),
    [(0, 0, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2), (1, 3, 1, 2), (2, 4, 0, 1)],
)
def test_srun_step_on_uneven_nodes(node: int, task: int, local: int, on_this_node: int) -> None:
    layout = cluster.detect(step_of(node, task, local))
    assert (layout.rank, layout.local_rank, layout.node_rank) == (task, local, node)
    assert (layout.world_size, layout.local_world_size, layout.num_nodes) == (5, on_this_node, 3)
    assert layout.main_address == "gpu09"


def test_an_address_and_a_port_that_are_set_win_under_srun() -> None:
    layout = cluster.detect(STEP | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert (layout.main_address, layout.main_port) == ("10.0.0.7", 4000)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="nothing"),
        pytest.param(BATCH, id="batch script"),
        pytest.param(STEP | {"SLURM_STEP_ID": "4294967290"}, id="interactive step"),
        pytest.param(STEP | {"SLURM_STEP_ID": "4294967291"}, id="batch step"),
        pytest.param(STEP | {"SLURM_STEP_ID": "4294967292"}, id="extern step"),
        pytest.param({"RANK": "1"}, id="a rank alone"),
        pytest.param({"WORLD_SIZE": "2"}, id="a size alone"),
    ],
)
def test_what_is_no_launch_is_alone(environment: Variables) -> None:
    layout = cluster.detect(environment)
    assert layout == Layout()
    assert layout.is_main
    assert not layout.started_outside


def test_our_own_launcher() -> None:
    layout = cluster.detect(LAUNCHED)
    assert layout == Layout(
        rank=1,
        local_rank=1,
        world_size=2,
        local_world_size=2,
        node_rank=0,
        num_nodes=1,
        main_address="127.0.0.1",
        main_port=51234,
        source="environment",
    )
    assert layout.started_outside
    assert not layout.is_main


def test_plain_variables_of_one_process_a_node() -> None:
    """As Kubernetes' PyTorchJob sets them."""
    layout = cluster.detect(
        {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    )
    assert (layout.local_rank, layout.local_world_size) == (0, 1)
    assert (layout.node_rank, layout.num_nodes) == (2, 3)


def test_the_innermost_launch_wins() -> None:
    assert cluster.detect(STEP | MPIRUN_5 | TORCHRUN).source == "torchelastic"
    assert cluster.detect(STEP | MPIRUN_5 | HOROVODRUN).source == "horovod"
    assert cluster.detect(STEP | MPIRUN_5).source == "openmpi"
    assert cluster.detect(STEP | LAUNCHED).source == "srun"


@pytest.mark.parametrize(
    ("chosen", "rank", "size"),
    [("torchelastic", 3, 4), ("srun", 2, 4), ("environment", 3, 4), ("none", 0, 1)],
)
def test_the_override_wins(chosen: str, rank: int, size: int) -> None:
    layout = cluster.detect(STEP | TORCHRUN | {"TRAINER_CLUSTER": chosen})
    assert (layout.source, layout.rank, layout.world_size) == (chosen, rank, size)


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
            "srun: SLURM_NODEID=2, but the step has 2 nodes (SLURM_STEP_TASKS_PER_NODE=2(x2)); "
            "the launch is broken",
        ),
        (
            LAUNCHED | {"LOCAL_WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE=0: this process is one of them; give at least 1",
        ),
        (
            LAUNCHED | {"LOCAL_RANK": "2"},
            "environment: local rank 2 of 2 (counted from 0) is invalid; the launch is broken",
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
            "nodes: rank 2 of 2 (counted from 0) is invalid; the launch is broken",
        ),
        (
            HYDRA,
            "hydra: 2 nodes, but the address of rank 0 is unknown; start them with "
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


def test_by_default_this_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CLUSTER", "environment")
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert cluster.detect() == cluster.detect(LAUNCHED)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu08", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("gpu[12,14-15]", "gpu12"),
        ("rack-2-node[001-128]", "rack-2-node001"),
        ("login1,gpu[1-2]", "login1"),
        ("n1.example.org", "n1.example.org"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert cluster.first_host(nodes) == host


def test_the_receipt_says_what_was_found_and_where() -> None:
    assert cluster.detect(TORCHRUN).receipt() == (
        "layout: 4 processes on 2 nodes, this one rank 3 (local 1 of 2), main node-a:29400, "
        "read from torchelastic (TRAINER_CLUSTER overrides)"
    )
    assert cluster.detect(STEP).receipt() == (
        "layout: 4 processes on 2 nodes, this one rank 2 (local 0 of 2), main gpu07:to be chosen, "
        "read from srun (TRAINER_CLUSTER overrides)"
    )
    assert Layout(world_size=2, local_world_size=2, source="environment").receipt() == (
        "layout: 2 processes on 1 node, this one rank 0 (local 0 of 2), read from environment "
        "(TRAINER_CLUSTER overrides)"
    )
    assert Layout(main_port=1).receipt() == (
        "layout: 1 process on 1 node, this one rank 0 (local 0 of 1), main 127.0.0.1:1, "
        "read from none (TRAINER_CLUSTER overrides)"
    )
