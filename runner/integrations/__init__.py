"""Clipping and its record in training loops of others."""
