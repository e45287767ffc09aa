"""Every program that a test compiles is checked after each pass: its IR verifies, and its text reads back as the same module."""

import os

os.environ.setdefault("DEPLO_VERIFY", "1")
