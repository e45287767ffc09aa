"""Random programs against a reference: PyTorch programs against eager mode and float64.

PYTHONPATH=tests/python python -m fuzz --seconds 600
"""
