"""Measure the steps of a run, and write the metrics to files, the terminal and trackers."""
