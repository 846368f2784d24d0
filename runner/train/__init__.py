"""Train: the loop, what it is built from, and what is checked before it starts."""
