"""`python -m deplo`: see deplo/cli.py."""

import sys

from .cli import main

sys.exit(main())
