"""MPI: Open MPI's mpirun, and hydra, the mpiexec of MPICH and Intel MPI."""

import os
import socket
from pathlib import Path

from ...errors import ConfigurationError
from .layout import Environment, Layout, Source, check_filled, read_size
from .srun import in_step


def _read_openmpi(env: Environment) -> Layout | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    rank, world_size = int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"])
    local_world_size = read_size("OMPI_COMM_WORLD_LOCAL_SIZE", env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # Open MPI 5 no longer sets the number of nodes.
    num_nodes = int(env.get("OMPI_MCA_orte_num_nodes", world_size // local_world_size))
    if num_nodes > 1 and "MASTER_ADDR" not in env:
        raise ConfigurationError(
            f"openmpi: {num_nodes} nodes, but the address of rank 0 is unknown; start them with "
            "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        )
    # In Open MPI 4, the first is a small number that is reused; the second one is random.
    launch = (env["PMIX_NAMESPACE"], env.get("OMPI_MCA_orte_precondition_transports", ""))
    return check_filled(
        Layout(
            rank=rank,
            local_rank=int(env["OMPI_COMM_WORLD_LOCAL_RANK"]),
            world_size=world_size,
            local_world_size=local_world_size,
            # OMPI_COMM_WORLD_NODE_RANK is the rank within its node, not the node's rank.
            node_rank=rank // local_world_size,
            num_nodes=num_nodes,
            main_address=env.get("MASTER_ADDR", "127.0.0.1"),
            main_port=int(env.get("MASTER_PORT", 0)),
            source="openmpi",
            launch_id="-".join(filter(None, launch)),
        )
    )


def _read_hydra(env: Environment) -> Layout | None:
    """The mpiexec of MPICH and Intel MPI. srun's PMI plugins set the first two variables too."""
    if not {"PMI_RANK", "PMI_SIZE"} <= env.keys():
        return None
    if "MPI_LOCALRANKID" not in env and (in_step(env) or env["PMI_SIZE"] == "1"):
        return None
    rank, world_size = int(env["PMI_RANK"]), int(env["PMI_SIZE"])
    local_rank = int(env["MPI_LOCALRANKID"])
    local_world_size = read_size("MPI_LOCALNRANKS", env["MPI_LOCALNRANKS"])
    num_nodes = -(-world_size // local_world_size)
    launch = _hydra_proxy() if num_nodes == 1 and "MASTER_PORT" not in env else ""
    if launch is None or (num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= env.keys()):
        raise ConfigurationError(
            f"hydra: {num_nodes} node{'s' * (num_nodes > 1)}, but the address of rank 0 is "
            "unknown; "
            "start them with mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500"
        )
    return check_filled(
        Layout(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            node_rank=rank // local_world_size,
            num_nodes=num_nodes,
            main_address=env.get("MASTER_ADDR", "127.0.0.1"),
            main_port=int(env.get("MASTER_PORT", 0)),
            source="hydra",
            launch_id=launch,
        )
    )


def _hydra_proxy() -> str | None:
    """Identify the hydra proxy that started this process: no variable identifies a launch."""
    process = os.getpid()
    while process > 1:
        try:
            # Source: man 5 proc_pid_stat; the name in parentheses may hold spaces.
            start, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        except OSError:
            return None
        fields = rest.split()
        if start.partition("(")[2] in ("hydra_pmi_proxy", "pmi_proxy"):
            return f"hydra-{socket.gethostname()}-{process}-{fields[19]}"
        process = int(fields[1])
    return None


OPEN_MPI = Source("openmpi", 30, _read_openmpi, r"OMPI_\w*(RANK|SIZE|num_nodes)")
HYDRA = Source("hydra", 40, _read_hydra)
