"""``python -m apex``: runs the command ``apex``."""

import sys

from apex.cli import main

if __name__ == "__main__":
    sys.exit(main())
