"""The command line where the `fedrepro` command is not on the path"""

import sys

from .cli.main import main

if __name__ == "__main__" and __package__ == "fedrepro":
    sys.exit(main())
