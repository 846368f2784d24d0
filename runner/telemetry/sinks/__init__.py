"""Where rows of metrics go: the terminal and wandb."""
