"""Every program that a test compiles is checked after each pass: its IR verifies, and its text reads back as the same module."""

import os

os.environ.setdefault("DEPLO_VERIFY", "1")

import pytest
import torch


@pytest.fixture
def fresh_inference():
    """Nothing compiled before, and no gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
