"""The errors and warnings that deplo raises; each C++ error class is the Python class of the same name here."""

from __future__ import annotations


class Error(Exception):
    """Base of every error of deplo."""


class UserError(Error):
    """The caller's mistake: an unknown option, a malformed .ir file, an input of the wrong shape."""


class UnsupportedError(Error):
    """deplo does not compile this in full; it runs in ATen instead unless `strict` is set."""


class InternalError(Error):
    """A bug in deplo; the text names the level and the pass."""


class FallbackWarning(UserWarning):
    """A whole graph runs in eager mode; the text says why."""
