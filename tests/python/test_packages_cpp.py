"""The C++ runtime: the example server, built by CMake as a user would, answers as eager mode does, without torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess

import pytest
import torch
from engines import needs_core
from torch import nn

import deplo

pytestmark = needs_core

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder with the examples' programs."""
    folder = str(tmp_path_factory.mktemp("serve"))
    runtime = os.path.join(os.path.dirname(os.path.abspath(deplo.__file__)), "cmake")
    options = [f"-Ddeplo_runtime_DIR={runtime}", f"-DTORCH_ROOT={os.path.dirname(torch.__file__)}", "-DCMAKE_BUILD_TYPE=Debug"]
    if ccache := shutil.which("ccache"):
        options.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}")
    for command in (["cmake", "-G", "Ninja", "-S", os.path.join(ROOT, "examples", "serve"), "-B", folder, *options], ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Client:
    """The other side of examples/serve/serve.cpp."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)

    def _take(self, format: str) -> tuple:
        return struct.unpack(format, self._bytes(struct.calcsize(format)))

    def _bytes(self, count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            part = self.socket.recv(count - len(parts))
            assert part, "the server is gone"
            parts += part
        return parts

    def __call__(self, *inputs):
        for value in inputs:
            if isinstance(value, int):
                self.socket.sendall(struct.pack("<q", value))
                continue
            elements = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
            self.socket.sendall(struct.pack(f"<I{value.dim()}q", value.dim(), *value.shape) + bytes(elements.flatten().tolist()))
        (status,) = self._take("<I")
        if status:
            raise RuntimeError(self._bytes(*self._take("<I")).decode())
        return [self._output() for _ in range(*self._take("<I"))]

    def _output(self):
        (kind,) = self._take("<I")
        if kind == 1:
            return self._take("<q")[0]
        if kind == 2:
            return self._bytes(*self._take("<I")).decode()
        dtype, rank = self._take("<II")
        sizes = self._take(f"<{rank}q")
        empty = torch.empty(sizes, dtype=DTYPES[dtype])
        content = self._bytes(empty.nbytes)
        return torch.frombuffer(bytearray(content), dtype=empty.dtype).view(sizes) if content else empty


@contextlib.contextmanager
def served(programs: str, path: str):
    """A function that makes clients of a server of this package."""
    process = subprocess.Popen([f"{programs}/serve", path], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline().removeprefix("listening on "))
        yield lambda: Client(port)
    finally:
        process.kill()
        process.communicate()


class Net(nn.Module):
    """Packed weights, a buffer that calls write, a symbolic size that is an input, constants among the outputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 256, dtype=dtype), nn.Linear(256, 64, dtype=dtype)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, n: int):
        self.count.add_(1)
        y = torch.softmax(self.second(torch.erf(self.first(x))), -1)
        return y, y.mT[: x.shape[0]] * n, self.count, x.shape[0] + n, None, x, 2.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_server_answers_as_eager_mode_does(programs, tmp_path, dtype):
    torch.manual_seed(0)
    model, path = Net(dtype), str(tmp_path / "net.deplo")
    shapes = {"x": {0: torch.export.Dim("rows", max=40)}, "n": torch.export.Dim.DYNAMIC}
    deplo.export(model, (torch.randn(8, 96, dtype=dtype), 3), dynamic_shapes=shapes, path=path)
    model.count.zero_()
    with served(programs, path) as connect:
        clients = connect(), connect()
        for rows in (0, 1, 33, 40):
            for client in clients:
                x = torch.randn(rows, 96, dtype=dtype)
                *tensors, last, none, same, number = client(x, rows + 1)
                wanted = model(x, rows + 1)
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                for actual, expected in zip(tensors, wanted, strict=False):
                    torch.testing.assert_close(actual, expected.detach(), rtol=tolerance, atol=tolerance)
                assert (last, none, number) == (wanted[3], "null", "2.5") and torch.equal(same, x)
        for bad, why in (
            ((torch.randn(41, 96, dtype=dtype), 3), "outside the range 0..40"),
            ((torch.randn(4, 95, dtype=dtype), 3), r"input x: expected .* of sizes \(4, 96\)"),
            ((torch.randn(4, dtype=dtype), 3), "input x: expected"),
        ):
            with pytest.raises(RuntimeError, match=why):
                clients[0](*bad)
        assert clients[0](x, 5)[2] == model.count + 1  # still there, and refused calls wrote nothing


def test_libtorch_tensors(programs, tmp_path):
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(7, 5), nn.Tanh()), str(tmp_path / "net.deplo")
    deplo.export(model, (torch.randn(3, 7),), dynamic_shapes=({0: torch.export.Dim("rows")},), path=path)
    done = subprocess.run([f"{programs}/run_torch", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shape, total = done.stdout.strip().split(" sum ")
    assert shape == "[4, 5]" and abs(float(total) - model(torch.ones(4, 7)).sum().item()) < 1e-4


def test_the_runtime_refuses_what_it_cannot_run(programs, tmp_path):
    class Sorted(nn.Module):
        def forward(self, x):
            return tuple(torch.sort(x + 1, stable=True))

    path = str(tmp_path / "sorted.deplo")
    deplo.export(Sorted(), (torch.randn(4, 50),), path=path)
    for given, why in ((path, "calls aten.sort.stable of ATen, which only PyTorch can run"), (__file__, "is no package of deplo")):
        done = subprocess.run([f"{programs}/serve", given], capture_output=True, text=True)
        assert done.returncode == 1 and why in done.stderr and given in done.stderr


def test_the_runtime_is_linked_with_the_systems_libraries_alone(programs):
    library = os.path.join(os.path.dirname(os.path.abspath(deplo.__file__)), "lib", "libdeplo_runtime.so")
    shown = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0] for line in shown.splitlines() if "NEEDED" in line}
    assert needed <= {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}, needed
