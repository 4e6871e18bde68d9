"""`python -m aotdist`: the command `aotdist`, where its script is not on the PATH."""

import sys

from aotdist.launch.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
