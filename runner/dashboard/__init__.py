"""A saved wandb workspace that shows the runs of a project as ``report.html`` does.

    python -m runner dashboard [--project P] [--entity E] [--group SWEEP] [--name NAME]

It needs the extra ``[dashboard]`` (wandb-workspaces), and a key for a wandb server; without a key
it writes what it would have sent to a file.
"""

EXTRA = "wandb_workspaces"
"""The module that the extra ``[dashboard]`` brings."""
