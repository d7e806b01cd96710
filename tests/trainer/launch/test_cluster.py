"""Who a process is, read from environments as launchers set them."""

from dataclasses import replace

import pytest
from my_project_trainer.errors import ConfigurationError, Problems
from my_project_trainer.launch import cluster
from my_project_trainer.options import Options
from my_project_trainer.run import plan

from cluster_environments import (
    BATCH,
    DEEPSPEED,
    HOROVODRUN,
    HYDRA,
    JSRUN,
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
    variables,
)

Layout = cluster.Layout
AT_0 = {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
# The last process of two nodes that have two each.
LAST = Layout(rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1, num_nodes=2)

AT_A = replace(LAST, main_address="node-a", main_port=29500)
ALONE = replace(LAST, rank=1, world_size=2, node_rank=0, num_nodes=1)
OF_MPIRUN = "712048641-c25f2c07ec99154e-ddcf6e4fe97c0b67"
OF_STEP = replace(LAST, rank=2, local_rank=0, main_address="gpu07", launch_id="4711.0.0")
# By the source, and what is to be said of it.
LAYOUTS: dict[str, tuple[Variables, cluster.Layout]] = {
    "torchelastic": (TORCHRUN, replace(AT_A, main_port=29400)),
    "srun": (STEP, OF_STEP),
    "horovod": (HOROVODRUN, replace(LAST, main_address="10.0.0.7", launch_id="10.0.0.7-8756")),
    "deepspeed": (DEEPSPEED, AT_A),
    "openmpi": (MPIRUN | MASTER, replace(AT_A, launch_id=OF_MPIRUN)),
    "openmpi, no address": (MPIRUN_5, replace(ALONE, launch_id="prterun-node-a-18038@1")),
    "hydra": (HYDRA | MASTER, AT_A),
    "jsrun": (JSRUN | MASTER, AT_A),
    "environment, of our own launcher": (LAUNCHED, replace(ALONE, main_port=51234)),
}


@pytest.mark.parametrize("launch", LAYOUTS)
def test_a_launch_is_read(launch: str) -> None:
    environment, expected = LAYOUTS[launch]
    layout = cluster.detect(environment)
    assert layout == replace(expected, source=launch.partition(",")[0])
    assert layout.started_outside
    assert not layout.is_main


def test_deepspeed_wins_over_the_step_that_its_daemons_run_in() -> None:
    assert cluster.detect(STEP | DEEPSPEED).source == "deepspeed"


def test_deepspeed_on_nodes_of_different_size_is_refused() -> None:
    uneven = DEEPSPEED | {"WORLD_SIZE": "5", "RANK": "4", "LOCAL_SIZE": "3"}
    with pytest.raises(ConfigurationError, match="deepspeed: rank 4 of 5 is 1 of 3 on its node"):
        cluster.detect(uneven)


def test_mpirun_of_open_mpi_5_on_several_nodes() -> None:
    more = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}
    layout = cluster.detect(MPIRUN_5 | MASTER | more)
    assert (layout.node_rank, layout.num_nodes) == (2, 3)


def test_srun_wins_over_hydra_where_it_has_started_the_ranks() -> None:
    """Its own plugins set PMI's variables; hydra inside a step sets more."""
    assert cluster.detect(STEP | PMI2).source == "srun"
    assert cluster.detect(STEP | HYDRA | MASTER).source == "hydra"
    assert cluster.detect(STEP | HYDRA | MASTER | MPIRUN).source == "openmpi"
    assert cluster.detect(PMI2 | LAUNCHED).source == "environment"
    assert cluster.detect(PMI2 | {"PMI_RANK": "0", "PMI_SIZE": "1"}) == Layout()


@pytest.mark.parametrize("count", ["NUM_NODES", "NNODES", "num_nodes"])
def test_a_command_that_is_started_once_on_each_node(count: str) -> None:
    environment = {name: ON_EACH_NODE[name] for name in ON_EACH_NODE if name != "NUM_NODES"}
    num_nodes = 2 if count == "num_nodes" else None
    environment |= {} if num_nodes else {count: "2"}
    layout = cluster.detect(environment, num_nodes=num_nodes)
    place = {"rank": 1, "world_size": 2, "node_rank": 1, "num_nodes": 2}
    assert layout == Layout(**place, main_address="node-a", main_port=29500, source="nodes")
    assert not layout.started_outside
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
    assert cluster.detect(environment | ranks, num_nodes=num_nodes).source == "environment"
    assert cluster.detect(environment | TORCHRUN, num_nodes=num_nodes).source == "torchelastic"


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
def test_mpirun_that_does_not_fill_node_after_node_is_refused(rank, local_rank, local_size, nodes):
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
        *({}, BATCH, {"RANK": "1"}, {"WORLD_SIZE": "2"}),
        # The interactive step, that of the batch script, and the extern step.
        *(STEP | {"SLURM_STEP_ID": f"429496729{last}"} for last in range(3)),
    ],
)
def test_what_is_no_launch_is_alone(environment: Variables) -> None:
    layout = cluster.detect(environment)
    assert layout == Layout()
    assert layout.is_main
    assert not layout.started_outside


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("WORLD_SIZE=3 NNODES=2", "WORLD_SIZE=3, NNODES=2"),
        ("WORLD_SIZE=2 NUM_NODES=1 LOCAL_RANK=0", ""),  # it starts two, and DeepSpeed sets the last
        ("NUM_NODES=2 TRAINER_CLUSTER=none", ""),
        *((word, word) for word in ("PET_NNODES=2", "RANK=0", "LOCAL_RANK=1", "PALS_RANKID=0")),
        ('SM_HOSTS=["algo-1","algo-2"]',) * 2,
        ('CLUSTER_SPEC={"chief":["a"],"worker":["b"]}',) * 2,
        ('TF_CONFIG={"cluster":{"worker":["a:1","b:1"]},"task":{"index":1}}',) * 2,
        ('SM_HOSTS=["a"] TF_CONFIG={"cluster":{"worker":["a"]},"task":{"id":0}}', ""),
    ],
)
def test_variables_of_a_launch_without_a_rank_and_a_size_are_a_note(words, said, monkeypatch):
    for name, value in variables(words).items():
        monkeypatch.setenv(name, value)
    notes = plan.make(Options(accelerator="cpu", devices=2), Problems()).notes
    rest = f"with no more than this, the process trains without others; {NEEDED}"
    line = f"{said}: {rest}, or NODE_RANK in one per node, or unset it"
    assert notes == ([line] if said else [])


def test_plain_variables_of_one_process_a_node() -> None:
    """As Kubernetes' PyTorchJob sets them."""
    main = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    layout = cluster.detect({"RANK": "2", "WORLD_SIZE": "3", **main})
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


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (cluster.detect(TORCHRUN), "rank 3 (local 1 of 2), main node-a:29400"),
        (cluster.detect(STEP), "rank 2 (local 0 of 2), main gpu07:to be chosen"),
        (replace(ALONE, source="environment"), "rank 1 (local 1 of 2)"),
        (Layout(main_port=1), "rank 0 (local 0 of 1), main 127.0.0.1:1"),
    ],
)
def test_the_receipt_says_what_was_found_and_where(layout: cluster.Layout, said: str) -> None:
    counts = {4: "4 processes on 2 nodes", 2: "2 processes on 1 node", 1: "1 process on 1 node"}
    assert layout.receipt() == (
        f"layout: {counts[layout.world_size]}, this one {said}, read from {layout.source} "
        "(TRAINER_CLUSTER overrides)"
    )


# --- environments that contradict themselves ------------------------------------------------------

STEPS = "SLURM_STEP_TASKS_PER_NODE"
PLACES = "(counted from 0) are impossible (at most 1048576 processes)"
ADVICE = "the launch is broken; TRAINER_CLUSTER=none ignores it, and trains in this process"
# What contradicts itself, and what is said of it before this advice.
BROKEN: list[tuple[Variables, str]] = [
    (
        variables("TRAINER_CLUSTER=environment RANK=0 WORLD_SIZE=2"),
        "environment: MASTER_ADDR is not set",
    ),
    ({"SLURM_STEP_ID": "0"}, "srun: SLURM_NODEID is not set"),
    *(
        (
            STEP | {"SLURM_NODEID": node, STEPS: tasks},
            f"srun: SLURM_NODEID={node} of 2 nodes, but the step has {nodes} nodes "
            f"({STEPS}={tasks})",
        )
        for node, tasks, nodes in (
            *(("2", "2(x2)", 2), ("1", "1(x999999999)", 999999999), ("1", "2(x-5)", -5)),
            ("1", "2", 1),
        )
    ),
    (
        LAUNCHED | {"LOCAL_WORLD_SIZE": "0"},
        "environment: LOCAL_WORLD_SIZE=0, but it is the number of processes on this node, at "
        "least 1",
    ),
    (
        LAUNCHED | {"LOCAL_RANK": "2"},
        f"environment: rank 1 of 2, local rank 2 of 2, node 0 of 1 {PLACES}",
    ),
    (
        ON_EACH_NODE | {"NODE_RANK": "2"},
        f"nodes: rank 2 of 2, local rank 0 of 1, node 2 of 2 {PLACES}",
    ),
    (LAUNCHED | {"RANK": "one"}, "environment: RANK='one' is not a number"),
]
NEEDED = "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
# What lacks something that can be added.
INCOMPLETE: list[tuple[Variables, str]] = [
    ({"TRAINER_CLUSTER": "hidra"}, "TRAINER_CLUSTER=hidra: no such source; did you mean 'hydra'?"),
    (
        {"TRAINER_CLUSTER": "xyz"},
        "TRAINER_CLUSTER=xyz: no such source; known: deepspeed, environment, horovod, hydra, "
        "jsrun, nodes, none, openmpi, srun, torchelastic",
    ),
    *(
        (
            more | {"TRAINER_CLUSTER": name},
            f"TRAINER_CLUSTER={name}: its variables are not set here",
        )
        for name, more in (("torchelastic", {}), ("srun", BATCH), ("environment", {"RANK": "0"}))
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
            "TRAINER_CLUSTER=none trains in this process alone",
        )
        for missing in ON_EACH_NODE
    ),
    (
        ON_EACH_NODE | {"LOCAL_RANK": "1"},
        "nodes: LOCAL_RANK=1, but neither RANK nor WORLD_SIZE; start the command once on each "
        "node without LOCAL_RANK, or set all three for each process",
    ),
    (
        HYDRA,
        "hydra: the address of rank 0 is unknown; start the ranks with "
        "mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500",
    ),
    (
        JSRUN,
        "jsrun: the address of rank 0 is unknown; start the ranks with "
        "jsrun -E MASTER_ADDR=HOST_OF_RANK_0 -E MASTER_PORT=29500",
    ),
    (
        variables("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 PMI_RANK=1 PMI_SIZE=2"),
        f"FLUX_JOB_SIZE=2, PMI_SIZE=2: the launcher is not known; {NEEDED} process",
    ),
    (
        HOROVODRUN | {"HOROVOD_SIZE": "3"},
        "horovod: rank 3 of 3 is 1 of 2 on its node, one of 2; start as many processes on each "
        "node, and fill one node after the other",
    ),
]


@pytest.mark.parametrize(
    ("environment", "line"), [*((env, f"{line}; {ADVICE}") for env, line in BROKEN), *INCOMPLETE]
)
def test_a_broken_environment_is_one_line(environment: Variables, line: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        cluster.detect(environment)
    assert raised.value.problems == [line]
