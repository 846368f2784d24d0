"""What the fork server of ranks imports in tests, beside what it imports for the command."""

import pytest  # noqa: F401
import timm.optim  # noqa: F401
import transformers.pytorch_utils  # noqa: F401

import runner.launch.preloaded  # noqa: F401
