"""The commands: one file each; overrides and flags in, an exit code out."""

FAILED, WRONG_REQUEST, INTERRUPTED = 1, 2, 130
"""Exit codes; that of a run that another signal stopped is 129 (SIGHUP) or 143."""
