"""``python -m mpistrat``: the command line."""

import sys

from mpistrat.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
