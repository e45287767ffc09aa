"""Forward and backward of the architectures that tests/python/test_architectures.py leaves out."""

from __future__ import annotations

import pytest
from architectures import ARCHITECTURES
from test_architectures import check


@pytest.mark.parametrize("name", list(ARCHITECTURES)[1::2])
def test_forward_and_backward(name: str) -> None:
    check(name)
