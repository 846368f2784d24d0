"""The command that compares the steps of a plugin with the steps of one process."""
