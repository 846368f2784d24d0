"""Measure gradients without clipping, and suggest thresholds.

Pascanu, Mikolov and Bengio 2013 (arXiv 1211.5063, section 3.2) observe the norm over many updates:
thresholds of half to ten times its mean still converge.
"""
