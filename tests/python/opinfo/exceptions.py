"""What of OpInfo cannot be judged against eager, and why. Everything else must pass; what PyTorch itself cannot trace is found out by running the
traced graph op by op in ATen."""

from __future__ import annotations

# The values are those of memory that nobody wrote: dtype, shape and strides are compared alone.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_"}

# With special values in the samples eager's own formulas disagree with one another, or with what they compute; by names with * and ?, and direction.
SPECIAL = {
    "*polygamma*/*": "eager's series have other values at the poles and at infinity",
    "digamma/backward": "eager's trigamma has no poles",
    "special.zeta/*": "eager's series has other values at the poles and at infinity",
    "nn.functional.elu/backward": "at NaN eager's float64 gives NaN and its float32 the gradient unchanged",
    "nn.functional.celu/backward": "at NaN eager's float64 gives NaN and its float32 the gradient unchanged",
    "nn.functional.selu/backward": "at NaN eager's float64 gives NaN and its float32 the gradient unchanged",
    "*fmod/*": "eager's vectors give NaN for subnormal divisors",
    "*remainder/*": "eager's vectors give NaN for subnormal divisors",
    "__rmod__/*": "eager's vectors give NaN for subnormal divisors",
    "logit/backward": "eager's loop over vectors and its loop over the rest differ at NaN",
    "nn.functional.relu6/backward": "eager's loop over vectors and its loop over the rest differ at NaN",
    "nn.functional.hardswish/backward": "eager's loop over vectors and its loop over the rest differ at NaN",
    "var_mean*/*": "the mean of infinities is NaN where eager updates it step by step",
    "std_mean*/*": "the mean of infinities is NaN where eager updates it step by step",
    "*layer_norm/*": "infinite sums and weights cancel in another order",
    "*group_norm/*": "infinite sums and weights cancel in another order",
    "nn.functional.scaled_dot_product_attention/*": "eager's loop over vectors and its loop over the rest differ at rows of NaN",
    "nn.functional.conv*/*": "padding takes part as zeros (docs/numerics.md)",
}

# Special values at which eager mode itself ends the process, or counts to two billion: not run.
FATAL = {"lcm/forward", "grid_sampler_2d/backward", "nn.functional.grid_sample/backward", "special.laguerre_polynomial_l/forward"}
