"""Checkpoints: save a training, find the newest whole checkpoint, load it under any layout."""
