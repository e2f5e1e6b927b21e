"""`python -m ravnest`: the same command line as `ravnest`."""

import sys

from ravnest.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
