"""What the fork server of ranks imports in tests, beside what it imports for the command."""

import pytest
import timm.optim
import transformers.pytorch_utils

import runner.launch.preloaded

__all__ = ["pytest", "runner", "timm", "transformers"]
