"""Products of rows with one of several matrices each: rows are laid into blocks of one matrix, so that a block reads it once."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

_ROWS = 64  # of a block: more of them share what is read of a matrix, fewer leave less of a block empty


@dataclasses.dataclass
class Blocks:
    """Rows of some groups in blocks of `_ROWS`: block b holds rows of the group `groups[b]` alone, row r of the input is place `places[r]`.

    There are as many blocks as the groups may need at most; those that hold no rows are of the last group. The rows of a block come first in it.
    """

    groups: torch.Tensor  # [blocks]
    counts: torch.Tensor  # [blocks]: rows that a block holds; 0 or less where there is none
    sources: torch.Tensor  # [blocks * _ROWS]: the row at a place, or the number of rows, where there is none
    places: torch.Tensor  # [rows]

    @staticmethod
    def of_choices(groups: torch.Tensor, count: int) -> Blocks:
        """For rows in any order, row r of group `groups[r]` < count."""
        rows = groups.shape[0]
        numbers = torch.arange(count, device=groups.device)
        belongs = groups[:, None] == numbers
        among = belongs.to(torch.int64).cumsum(0)  # of each row: how many up to it are of each group
        needed = (among[-1] + (_ROWS - 1)) // _ROWS
        ends = needed.cumsum(0)
        first = (ends - needed) * _ROWS
        places = torch.where(belongs, first + among - 1, 0).sum(1)
        blocks = (rows + _ROWS - 1) // _ROWS + count
        sources = torch.full((blocks * _ROWS,), rows, dtype=torch.int64, device=groups.device)
        sources = sources.scatter(0, places, torch.arange(rows, device=groups.device))
        groups = _group_of_blocks(ends, blocks)
        counts = among[-1][groups] - (torch.arange(blocks, device=groups.device) - (ends - needed)[groups]) * _ROWS
        return Blocks(groups, counts, sources, places)

    @staticmethod
    def of_ends(ends_of_rows: torch.Tensor, rows: Any) -> Blocks:
        """For rows sorted by group, where group g ends before row `ends_of_rows[g]`. Rows after the last group belong to it."""
        ends_of_rows = ends_of_rows.to(torch.int64)
        count = ends_of_rows.shape[0]
        starts = torch.cat([ends_of_rows.new_zeros(1), ends_of_rows[:-1]])
        needed = (ends_of_rows - starts + (_ROWS - 1)) // _ROWS
        ends = needed.cumsum(0)
        first = ends - needed
        blocks = (rows + _ROWS - 1) // _ROWS + count
        groups = _group_of_blocks(ends, blocks)
        inside = (torch.arange(blocks, device=ends.device) - first[groups]) * _ROWS
        row = starts[groups] + inside
        row = row[:, None] + torch.arange(_ROWS, device=ends.device)
        sources = torch.where(row < ends_of_rows[groups][:, None], row, rows).reshape(-1)
        number = torch.arange(rows, device=ends.device)
        group = (ends_of_rows <= number[:, None]).sum(1).clamp(max=count - 1)
        counts = (ends_of_rows - starts)[groups] - inside
        return Blocks(groups, counts, sources, first[group] * _ROWS + number - starts[group])

    def only(self, products: torch.Tensor) -> torch.Tensor:
        """`products` [blocks, _ROWS, N] where a block holds rows, 0 elsewhere: what is not there, need not be computed."""
        places = torch.arange(_ROWS, device=products.device)
        return torch.where((places < self.counts[:, None])[:, :, None], products, 0)

    def gather(self, x: torch.Tensor, repeats: int = 1) -> torch.Tensor:
        """[blocks, _ROWS, H] of rows x[r // repeats], 0 where there is none."""
        row = torch.div(self.sources, repeats, rounding_mode="floor")
        there = row < x.shape[0]
        taken = torch.where(there[:, None], x[row.clamp(0, x.shape[0] - 1)], 0)
        return taken.reshape(-1, _ROWS, x.shape[1])


def _group_of_blocks(ends: torch.Tensor, blocks: Any) -> torch.Tensor:
    """The group of each block, where group g ends before block `ends[g]`."""
    numbers = torch.arange(blocks, device=ends.device)
    return (ends <= numbers[:, None]).sum(1).clamp(0, ends.shape[0] - 1)


def grouped_mm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[S, N]: row s of `x` [S, K] times the matrix of its group in `weights` [G, K, N]; group g ends before row `ends[g]`."""
    blocks = Blocks.of_ends(ends, x.shape[0])
    result = blocks.only(torch.bmm(blocks.gather(x), weights[blocks.groups]))
    return result.reshape(-1, result.shape[2])[blocks.places]
