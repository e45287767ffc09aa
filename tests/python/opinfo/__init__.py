"""PyTorch's own samples of every operator (OpInfo) through deplo, forward and backward, judged by eager mode and float64.

`python -m opinfo` (`make opinfo`) runs everything in worker processes; `units` runs one operator in one dtype; `judge` compares; `exceptions` lists
what cannot be judged.
"""
