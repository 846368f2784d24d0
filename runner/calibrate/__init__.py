"""Measure gradients without clipping, and suggest thresholds."""
