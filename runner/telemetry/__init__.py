"""What is measured in a run, and where it goes: files, the terminal, wandb."""
