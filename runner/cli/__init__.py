"""The commands: one file each; overrides and flags in, an exit code out."""
