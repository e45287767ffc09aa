"""Every program that a test compiles is checked after each pass: its IR verifies, and its text reads back as the same module."""

import os

os.environ.setdefault("DEPLO_VERIFY", "1")
# Two workers share two cores: OpenMP's threads, which ATen uses, must not spin on one that the other worker needs. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


@pytest.fixture
def fresh_inference():
    """Nothing compiled before, and no gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
