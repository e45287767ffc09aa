"""A GPU: the same line as on a CPU where there is one; without one, what deplo would run there, judged from its machine code.

python examples/gpu.py
"""

from __future__ import annotations

import torch

from deplo.cli import main as deplo_command

EXPRESSION = "torch.softmax(r(256, 1000), -1)"


def on_the_gpu() -> None:
    x = torch.randn(256, 1000, device="cuda")
    compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="deplo", options={"strict": True})
    torch.testing.assert_close(compiled(x), torch.softmax(x, -1))
    print(f"softmax of (256, 1000) on {torch.cuda.get_device_name()}")


def without_a_gpu() -> None:
    print("There is no GPU here (torch.cuda.is_available() is False): nothing runs on one. The CUDA text, and what NVIDIA's compiler makes of it:\n")
    deplo_command(["compile", "-c", EXPRESSION, "--ir", "cuda"])
    deplo_command(["explain", "-c", EXPRESSION, "--device", "h100"])  # registers, bytes, and the least time by the roofline
    deplo_command(["compile", "-c", EXPRESSION, "--ir", "sass", "--arch", "sm_90"])


if __name__ == "__main__":
    on_the_gpu() if torch.cuda.is_available() else without_a_gpu()
