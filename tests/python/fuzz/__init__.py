"""Random programs against a reference: PyTorch programs against eager mode and float64, Tensor and Loop IR against their interpreters.

PYTHONPATH=tests/python python -m fuzz --seconds 600
"""
