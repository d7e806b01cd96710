"""Who a process is, read from environments as launchers set them."""

from dataclasses import replace

import pytest
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch import cluster

from cluster_environments import (
    BATCH,
    DEEPSPEED,
    HOROVODRUN,
    HYDRA,
    LAUNCHED,
    MASTER,
    MPIRUN,
    MPIRUN_5,
    ON_EACH_NODE,
    PMI2,
    STEP,
    TORCHRUN,
    Variables,
    step_of,
)

Layout = cluster.Layout
AT_0 = {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
# The last process of two nodes that have two each.
LAST = Layout(rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1, num_nodes=2)


def test_torchrun() -> None:
    assert cluster.detect(TORCHRUN) == replace(
        LAST, main_address="node-a", main_port=29400, source="torchelastic"
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
    assert cluster.detect(HOROVODRUN) == replace(
        LAST, main_address="10.0.0.7", source="horovod", launch_id="10.0.0.7-8756"
    )


def test_deepspeed() -> None:
    assert cluster.detect(DEEPSPEED) == replace(
        LAST, main_address="node-a", main_port=29500, source="deepspeed"
    )


def test_deepspeed_wins_over_the_step_that_its_daemons_run_in() -> None:
    assert cluster.detect(STEP | DEEPSPEED).source == "deepspeed"


def test_deepspeed_on_nodes_of_different_size_is_refused() -> None:
    uneven = DEEPSPEED | {"WORLD_SIZE": "5", "RANK": "4", "LOCAL_SIZE": "3"}
    with pytest.raises(ConfigurationError, match="deepspeed: rank 4 of 5 is 1 of 3 on its node"):
        cluster.detect(uneven)


def test_mpirun() -> None:
    layout = cluster.detect(MPIRUN | MASTER)
    assert layout == replace(
        LAST,
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
    assert cluster.detect(HYDRA | MASTER) == replace(
        LAST, main_address="node-a", main_port=29500, source="hydra"
    )


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


@pytest.mark.parametrize(
    ("environment", "source"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "environment"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node-a"}, "environment"),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "1"}, "torchelastic"),
        (HYDRA | dict.fromkeys(("PMI_SIZE", "MPI_LOCALNRANKS"), "1") | AT_0, "hydra"),
    ],
)
def test_a_rank_without_others_needs_no_address(environment: Variables, source: str) -> None:
    layout = cluster.detect(environment)
    assert (layout.rank, layout.world_size, layout.source) == (0, 1, source)


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
