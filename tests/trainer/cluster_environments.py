"""Variables as each launcher sets them."""

Variables = dict[str, str]


def variables(text: str) -> Variables:
    """Read ``NAME=value`` words."""
    return dict(word.split("=", 1) for word in text.split())


# torchrun --nnodes 2 --nproc-per-node 2, the second process of the second node.
TORCHRUN = variables("""
    GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node-a
    MASTER_PORT=29400 RANK=3 ROLE_NAME=default ROLE_RANK=3 ROLE_WORLD_SIZE=4
    TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=none
    TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=4
""")

# sbatch --nodes 2 --ntasks-per-node 2: what the batch script itself sees.
BATCH = variables("""
    SLURMD_NODENAME=gpu07 SLURM_JOBID=4711 SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=gpu[07-08]
    SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NODELIST=gpu[07-08]
    SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2)
""")

# srun in it: the first task of the second node.
STEP = BATCH | variables("""
    SLURMD_NODENAME=gpu08 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=2 SLURM_STEPID=0
    SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[07-08] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=2(x2)
""")

# horovodrun --gloo -np 4 -H node-a:2,node-b:2, the second process of the second node.
HOROVODRUN = variables("""
    HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2
    HOROVOD_GLOO_IFACE=eth0 HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.7 HOROVOD_GLOO_RENDEZVOUS_PORT=8756
    HOROVOD_HOSTNAME=node-b HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_RANK=3 HOROVOD_SIZE=4
    NCCL_SOCKET_IFNAME=eth0
""")

# mpirun -H node-a:2,node-b:2 -np 4 of Open MPI 4.1, the second process of the second node.
MPIRUN = variables("""
    OMPI_APP_CTX_NUM_PROCS=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_FIRST_RANKS=0
    OMPI_MCA_ess_base_jobid=712048641 OMPI_MCA_ess_base_vpid=3 OMPI_MCA_orte_ess_node_rank=1
    OMPI_MCA_orte_ess_num_procs=4 OMPI_MCA_orte_num_nodes=2
    OMPI_MCA_orte_precondition_transports=c25f2c07ec99154e-ddcf6e4fe97c0b67 OMPI_UNIVERSE_SIZE=4
    PMIX_HOSTNAME=node-b PMIX_ID=712048641.3 PMIX_NAMESPACE=712048641 PMIX_RANK=3
""")

# mpirun -np 2 of Open MPI 5.0 on one node, its second process.
MPIRUN_5 = variables("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_num_procs=2 OMPI_NUM_APP_CTX=1
    OMPI_UNIVERSE_SIZE=2 OMPI_VERSION=5.0.11 OMPI_WORLD_LOCAL_SIZE=2 OMPI_WORLD_SIZE=2
    PMIX_HOSTNAME=node-a PMIX_NAMESPACE=prterun-node-a-18038@1 PMIX_RANK=1 PRTE_LAUNCHED=1
""")

# mpiexec.hydra -hosts node-a,node-b -ppn 2 -n 4 of MPICH 4.0, the second node's second process.
HYDRA = variables("""
    GFORTRAN_UNBUFFERED_PRECONNECTED=y HYDI_CONTROL_FD=7 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=node-b
    MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=3 PMI_SIZE=4
""")

# jsrun -n 4 -r 2 of LSF, with --smpiargs=none: the second process of the second node.
JSRUN = variables("""
    JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2 JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4
""")

# What srun --mpi=pmi2 sets beside the step's own variables.
PMI2 = {"PMI_FD": "3", "PMI_JOBID": "4711.0", "PMI_RANK": "2", "PMI_SIZE": "4"}

# A command that somebody starts on each of two nodes: the second one.
ON_EACH_NODE = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500", "NODE_RANK": "1", "NUM_NODES": "2"}

# deepspeed -H HOSTS of two nodes with two slots each: the second process of the second node.
DEEPSPEED = variables("""
    CROSS_RANK=1 CROSS_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2 MASTER_ADDR=node-a MASTER_PORT=29500 RANK=3
    WORLD_SIZE=4
""")

# Where a launch on several nodes by mpirun is told that rank 0 is.
MASTER = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}

# What our own launcher sets for rank 1 of 2 on one node.
LAUNCHED = variables("""
    LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=51234 RANK=1 WORLD_SIZE=2
""")


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
