"""The commands: one file each; overrides and flags in, an exit code out."""

FAILED, WRONG_REQUEST, INTERRUPTED = 1, 2, 130
"""Exit codes; 143 is that of a run that was terminated."""
