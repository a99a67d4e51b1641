"Files fit to be committed: `python tools/tidy.py FILE...`, without a FILE all that git knows"
import re
import subprocess
import sys
from pathlib import Path

MOST = 1_000_000  # bytes
RULES = {"a line ends in white space": rb"[ \t]$", "carriage returns": rb"\r", "blank lines at the end": rb"\n\n\Z",
         "what a merge left": rb"^(<{7}|>{7}) "}

def faults(content: bytes, picture: bool = False) -> list[str]:
    "What is wrong with a file's content"
    large = [f"{len(content)} bytes, more than {MOST}"] * (len(content) > MOST)
    if picture or b"\0" in content: return large + ["binary"] * (not picture)
    found = large + [fault for fault, pattern in RULES.items() if re.search(pattern, content, re.MULTILINE)]
    return found + ["no end of line at the end"] * (content[-1:] not in (b"", b"\n", b"}"))  # json is as it was written

def main(names: list[str]) -> int:
    names = names or subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    files = [path for path in map(Path, names) if path.is_file() and not path.is_symlink()]
    lines = [f"{path}: {fault}" for path in files for fault in faults(path.read_bytes(), path.suffix == ".png")]
    if lines: print(*lines, sep="\n")
    return bool(lines)

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
