"""perf and gdb know kernels by names that say what they fuse."""

from __future__ import annotations

import shutil
import subprocess
import sys

from engines import needs_core

PROGRAM = """
import os, torch, deplo
f = torch.compile(lambda x: torch.softmax(x * 2, -1).relu(), backend="deplo", options={"debug": True, "strict": True, "cache_dir": "off"})
x = torch.randn(8, 64)
f(x)
path = f"/tmp/perf-{os.getpid()}.map"
print(open(path).read())
os.unlink(path)
f(x)
"""


def run(*command: str) -> str:
    result = subprocess.run([*command, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_core
def test_perf_map_and_gdb_name_kernels():
    ((address, size, name),) = [line.split() for line in run().splitlines() if line]
    assert "softmax" in name and "relu" in name and int(address, 16) and 0 < int(size, 16) < 1 << 20
    # tests/cpp/codegen_test.cpp reads what gdb would; here gdb itself stops in the kernel, where there is one.
    if gdb := shutil.which("gdb"):
        commands = ["set breakpoint pending on", f"break {name}", "run", "backtrace 2", "kill"]
        out = run(gdb, "-q", "-batch", *(part for text in commands for part in ("-ex", text)), "--args")
        assert f"in {name} ()" in out or f"#0  0x{int(address, 16):016x} in {name}" in out, out[-2000:]
