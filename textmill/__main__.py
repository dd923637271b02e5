"""python -m textmill."""

from __future__ import annotations

import sys

from textmill.cli import main

if __name__ == "__main__":
    sys.exit(main())
