"""Whether a result is as good as eager's: dtype, shape and strides equal, integers equal, floats judged by float64.

A float may be as far from the float64 answer as eager's own answer is, and a few ulp farther. For functions of single elements, the distance is taken
in ulps of each element, for all others in ulps of the largest one. Where a sum cancels, an ulp of the result says little: there the bound is what the
float64 answer moves by when the inputs move by a few ulp, and eager's largest error at those inputs. Inputs of whole numbers do not move; the results
of eager's operators do instead.

Float64 has two judges. Functions of a single number are judged by mpmath (deplo.numerics). For all others eager's own rounding error is measured: its
operators run again with every result moved by at most an ulp, and a result may be as far from eager's as those runs are, and a few ulp farther.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ULPS = 4

Nearby = Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]]


def described(t: torch.Tensor) -> str:
    if t.layout != torch.strided:
        return f"{t.layout} {str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"
    return f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)} strides {t.stride()}"


def complaint(
    got: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor | None,
    single_elements: bool,
    nearby: Nearby | None = None,
    proven: bool = False,
) -> str:
    """What is wrong with `got`, or nothing. `exact` is the answer of float64 inputs; without it, eager's answer stands for it, as where the two are
    far apart, unless it is `proven`.

    `nearby` gives pairs of eager's and float64's answer for inputs that were moved by at most ULPS ulp (float64: with larger rounding errors).
    """
    if described(got) != described(eager):
        return f"{described(got)} where eager gives {described(eager)}"
    if got.layout != torch.strided:
        got, eager = got.to_dense(), eager.to_dense()
        exact = exact.to_dense() if exact is not None else None
    if not got.numel():
        return ""
    if not got.is_floating_point() and not got.is_complex():
        bad = got != eager
        return _first(bad, got, eager) if bad.any() else ""
    if got.is_complex():
        got, eager = torch.view_as_real(got.resolve_conj()), torch.view_as_real(eager.resolve_conj())
        exact = torch.view_as_real(exact.resolve_conj()) if exact is not None and exact.is_complex() else None
    if exact is None or exact.shape != eager.shape or not exact.is_floating_point():
        exact = eager
    return _float_complaint(got, eager, exact, single_elements, nearby, proven)


def _ulp(x: torch.Tensor, dtype: torch.dtype, single_elements: bool) -> torch.Tensor:
    scale = x.abs() if single_elements else x.abs().max().expand(x.shape)
    return torch.clamp(scale, min=torch.finfo(dtype).tiny) * torch.finfo(dtype).eps


def _first(bad: torch.Tensor, got: torch.Tensor, want: torch.Tensor, what: str = "eager gives") -> str:
    at = tuple(bad.nonzero()[0].tolist())
    return f"{int(bad.sum())} of {bad.numel()} values: {got[at].item()!r} at {list(at)} where {what} {want[at].item()!r}"


def _float_complaint(
    got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, single_elements: bool, nearby: Nearby | None, proven: bool = False
) -> str:
    same = (got == eager) | (got.isnan() & eager.isnan())
    if same.all():
        return ""
    rounded = exact.to(got.dtype)
    special = ~same & ~(got.isfinite() & rounded.isfinite())
    bad = special & ~((got == rounded) | (got.isnan() & rounded.isnan()))
    if bad.any():
        return _first(bad, got, eager)
    valid = got.isfinite() & rounded.isfinite()
    g, e, x = (torch.where(valid, t.double(), 0.0) for t in (got, torch.where(eager.isfinite(), eager.double(), exact.double()), exact))
    if not proven and float((e - x).norm()) > 0.1 * float(x.norm()) and torch.finfo(got.dtype).eps < 1e-3:
        x = e  # float64 gives another answer altogether (another branch, another rounding): eager's is the one to meet
    ulp = _ulp(x, got.dtype, single_elements)
    ours, theirs = (g - x).abs() / ulp, (e - x).abs() / ulp
    # Of a proven value each element's own error counts: where eager's formula loses all digits, the others must be right all the same.
    allowed = (theirs if proven else theirs.max()) + ULPS
    bad = (ours > allowed) & ~same
    mean_is_good = float(ours.norm()) <= 2 * float(theirs.norm()) + ULPS * ours.numel() ** 0.5
    if not bad.any() and mean_is_good:
        return ""
    if nearby is not None and (not single_elements or exact is eager):
        farther = torch.zeros_like(x)
        for eager_there, exact_there in nearby():
            if exact_there.shape == exact.shape and eager_there.shape == exact.shape:
                for a, b in ((exact_there, exact), (eager_there, exact_there)):
                    difference = torch.where(valid, (a.double() - b.double()).abs(), 0.0)
                    farther = torch.maximum(farther, difference.nan_to_num(0.0, 0.0, 0.0))
        if not single_elements:
            farther = farther.max()
        bad = ((g - x).abs() > allowed * ulp + 2 * farther) & ~same
        if not bad.any():
            return ""
    worst = int(torch.argmax(torch.where(same, 0.0, ours)))
    return (
        f"{float(ours.flatten()[worst]):.3g} ulp from float64 where eager is at most {float(theirs.max()):.3g} away:"
        f" {got.flatten()[worst].item()!r}, eager {eager.flatten()[worst].item()!r}, float64 {exact.flatten()[worst].item()!r}"
    )
