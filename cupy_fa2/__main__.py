"""``python -m cupy_fa2``."""

import sys

from cupy_fa2.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
