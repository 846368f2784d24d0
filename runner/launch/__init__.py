"""Start a run: in this process, on local ranks, or on ranks started by torchrun or Slurm."""
