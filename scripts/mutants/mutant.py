"""Which mutant is active, for Python: mutant.h's file, named by DEPLO_MUTANTS."""

from __future__ import annotations

import os
from pathlib import Path

from shared import Shared

_SHARED = Shared(Path(os.environ["DEPLO_MUTANTS"])) if "DEPLO_MUTANTS" in os.environ else None


def active(number: int) -> bool:
    return _SHARED is not None and _SHARED.asks(number)
