"""Whether a plugin's clipped step is that of one process: the same batches, side by side.

    python -m runner verify <the words of a run>

The plugin's side is the training loop of a run. The reference is one process that holds the whole
model and reads, one after the other, every part of every microbatch that the plugin deals out.
"""
