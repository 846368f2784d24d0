"""What plugins are made of: axes of ranks, and one file a way to split a model over them."""
