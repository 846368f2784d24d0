"""From overrides to checked configurations: the side of this project that knows Hydra."""
