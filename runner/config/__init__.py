"""What a configuration may say: types, ranges, sizes, and the messages about wrong requests."""
