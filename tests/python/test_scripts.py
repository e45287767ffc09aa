"""What the scripts say where something is missing: one line with the remedy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_venv(venv: Path, **environment: str) -> str:
    """What make_venv.sh prints where it fails."""
    done = subprocess.run(
        ["/bin/bash", ROOT / "scripts/make_venv.sh", venv], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    return done.stderr


def python_that(folder: Path, text: str) -> Path:
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_python(tmp_path):
    for error in (make_venv(tmp_path / "venv", PYTHON="/nonexistent"), make_venv(tmp_path / "venv", PATH=str(tmp_path), PYTHON="python3")):
        assert error.startswith("deplo: there is no ") and "apt-get install python3" in error and error.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_another_python(tmp_path):
    old = python_that(tmp_path / "old", 'if [ "$1" = --version ]; then echo Python 3.9.1; else exit 1; fi')
    error = make_venv(tmp_path / "venv", PYTHON=str(old))
    assert "is Python 3.9.1; deplo needs 3.11 to 3.13" in error and error.count("\n") == 1


@pytest.mark.parametrize("target", ["exit 1", None], ids=["fails", "gone"])
def test_an_environment_whose_python_does_not_run(tmp_path, target):
    python = python_that(tmp_path / "venv", target or "")
    if target is None:
        python.unlink()
        python.symlink_to("/nonexistent/python3")
    error = make_venv(tmp_path / "venv")
    assert "does not run, or is not one from 3.11 to 3.13. Remove it (rm -r " in error


def test_an_environment_without_pip(tmp_path):
    python_that(tmp_path / "venv", 'case "$*" in *sys.version_info*) exit 0 ;; *) exit 1 ;; esac')
    error = make_venv(tmp_path / "venv")
    assert "has no pip, and ensurepip cannot install it. Remove it (rm -r " in error and error.count("\n") == 1
