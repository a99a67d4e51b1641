"`python tools/export_benchmarks.py`: benchmarks/*.py from the notebooks beside them, as nbdev_export does for the package"

import sys
from pathlib import Path

from nbdev.export import nb_export

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks")
    for page in sorted(folder.glob("*.ipynb")):
        nb_export(page, lib_path=folder)
