"""Compare the steps of a plugin with those of one process on the same batches."""
