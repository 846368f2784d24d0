"""Where the rows of a run go: the terminal and wandb."""
