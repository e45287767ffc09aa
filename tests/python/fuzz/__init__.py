"""Random programs against a reference: PyTorch programs against eager mode and float64, Tensor IR against its interpreter.

PYTHONPATH=tests/python python -m fuzz --seconds 600
"""
