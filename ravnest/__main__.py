"""`python -m ravnest`: same as the command `ravnest`."""

import sys

from ravnest.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
