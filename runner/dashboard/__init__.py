"""A wandb workspace for the runs of a project; needs the extra ``[dashboard]``."""
