"""The command that measures gradients without clipping and suggests thresholds."""
