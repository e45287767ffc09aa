"""Every program that a test compiles is checked after each pass: its IR verifies, and its text reads back as the same module."""

import gc
import os

os.environ.setdefault("DEPLO_VERIFY", "1")
# What somebody tuned on this machine is no business of a test.
os.environ.setdefault("DEPLO_TUNE", "off")
# Two workers share two cores: OpenMP's threads, which ATen uses, must not spin on one that the other worker needs. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd

# Eager mode on CPUs, which judges, rounds no operand of a convolution; PyTorch's default lets GPUs do so (deplo/tf32.py).
torch.backends.cudnn.allow_tf32 = False

# Python's collector went through all that importing torch makes again and again: a sixth of the tests' time.
gc.collect()
gc.freeze()
gc.set_threshold(10_000, 20, 50)


@pytest.fixture
def winners(tmp_path, monkeypatch):
    """An empty folder for winners, which compilations use, and nothing compiled."""
    monkeypatch.setenv("DEPLO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DEPLO_TUNE", "auto")
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield tmp_path
    torch._dynamo.reset()


@pytest.fixture
def fresh_inference():
    """Nothing compiled before, and no gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
