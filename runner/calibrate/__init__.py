"""Measure gradients without clipping, and suggest thresholds.

    python -m runner calibrate [overrides of a run]

Pascanu, Mikolov and Bengio 2013 (arXiv 1211.5063, section 3.2) observe the norm over many updates:
thresholds of half to ten times its mean still converge. For modes that clip elements or units,
thresholds are suggested by the share of these that they would clip.
"""
