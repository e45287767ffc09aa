"""One kernel of a kind, judged by eager mode in float64: python benchmarks/gpu_kinds.py KIND [--dry]

Prints "KIND: right" or "KIND: wrong" with both errors. A process a kind: what hangs, or breaks the device, is known by name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rows import random
from harness import max_error

BF16 = torch.bfloat16


def _images() -> tuple[torch.Tensor, ...]:
    return random(8, 64, 28, 28, dtype=BF16).contiguous(memory_format=torch.channels_last), random(64, 64, 3, 3, dtype=BF16)


def _heads(heads: int, length: int) -> torch.Tensor:
    return random(1, heads, length, 128, dtype=BF16)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1])


KINDS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "points": (F.gelu, lambda: (random(512, 1024),)),
    "rows": (lambda x: torch.softmax(x, -1), lambda: (random(512, 1024),)),
    "float32": (torch.matmul, lambda: (random(256, 256), random(256, 256))),
    "tiles": (torch.matmul, lambda: (random(256, 512, dtype=BF16), random(512, 256, dtype=BF16))),
    "matrix": (torch.matmul, lambda: (random(16, 512, dtype=BF16), random(512, 256, dtype=BF16))),
    "groups": (lambda x, y: F.relu(x) @ y, lambda: (random(256, 512, dtype=BF16), random(512, 256, dtype=BF16))),
    "attention": (_attention, lambda: (_heads(4, 256), _heads(4, 256), _heads(4, 256))),
    "decoding": (_attention, lambda: (_heads(32, 1), _heads(8, 1024), _heads(8, 1024))),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), _images),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--dry", action="store_true", help="on the stand-in of the tests")
    given = parser.parse_args()
    options: dict[str, Any] = {"strict": True}
    if given.dry:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
        from devices import EMULATED, stand_in

        stand_in()
        torch.cuda._lazy_init = lambda: None
        options |= {"cuda_driver": EMULATED, "nvrtc": EMULATED}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    fn, make = KINDS[given.kind]
    torch.manual_seed(0)
    inputs = make()
    start = time.perf_counter()
    with torch.no_grad():
        got = torch.compile(fn, backend="deplo", options=options)(*inputs)
        want = fn(*(x.double() for x in inputs))
        error, eager = max_error(got, want), max_error(fn(*inputs), want)
    right = error <= 2 * eager + torch.finfo(inputs[0].dtype).eps
    print(f"{given.kind}: {'right' if right else 'wrong'}, error {error:.1e}, eager {eager:.1e}, {time.perf_counter() - start:.1f} s")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
