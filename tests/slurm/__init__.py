"""Tests on a real SLURM cluster, which `slurm/cluster.sh` starts."""
