"""Save a wandb workspace that shows the runs of a project as ``report.html`` does.

    python -m runner dashboard [--project P] [--entity E] [--group SWEEP] [--name NAME]

This needs the extra ``[dashboard]`` (wandb-workspaces) and a key for a wandb server. Without a key
the specification of the workspace is written to a file.
"""

EXTRA = "wandb_workspaces"
"""Module that the extra ``[dashboard]`` installs."""
