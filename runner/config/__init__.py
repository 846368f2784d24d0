"""What a configuration may say: types, ranges, sizes, and the messages about wrong requests.

This package imports nothing else of `runner`, and neither torch nor Hydra.
"""
