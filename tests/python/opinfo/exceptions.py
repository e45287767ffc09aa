"""What of OpInfo cannot be judged against eager, and why. Everything else must pass; what PyTorch itself cannot trace is found out by running the
traced graph op by op in ATen."""

from __future__ import annotations

# The values are those of memory that nobody wrote: dtype, shape and strides are compared alone.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_"}
