"""Learning-rate schedules, and what is known about optimizers."""
