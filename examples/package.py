"""Shipping a package: a model with a symbolic batch compiled into one file, which another process loads without tracing or compiling.

python examples/package.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import deplo

SERVER = """
import sys, torch, deplo

served = deplo.load(sys.argv[1])
x = torch.load(sys.argv[2])
torch.save([served(x[:n]) for n in (1, 3, 8)], sys.argv[3])
"""


def main() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval(), torch.randn(8, 16)
    with tempfile.TemporaryDirectory() as folder:
        package, given, answers = (str(Path(folder) / name) for name in ("model.deplo", "x.pt", "y.pt"))
        deplo.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},), path=package)
        torch.save(x, given)
        subprocess.run([sys.executable, "-c", SERVER, package, given, answers], check=True)
        for result in torch.load(answers):
            torch.testing.assert_close(result, model(x[: len(result)]))
        print(f"{Path(package).stat().st_size} bytes served batches of 1, 3 and 8 as eager mode does")


if __name__ == "__main__":
    main()
