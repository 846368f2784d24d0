"""Compare the steps of a plugin with those of one process on the same batches.

    python -m runner verify [overrides of a run]

The plugin runs in the training loop of a run. The reference is one process that holds the whole
model and reads the parts of every microbatch of all data-parallel ranks in turn.
"""
