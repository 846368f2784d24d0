"""From overrides to checked configurations, by Hydra."""
