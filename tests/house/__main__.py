"""`python -m tests.house [PATH …]`: what breaks the rules of the house; exit code 1 where anything does.

Without a path: the package, its pages and the README.
"""

import sys
from pathlib import Path

from tests.house import plain_english, repetition, sizes

PROSE = ("ravnest", "docs", "README.md", "CONTRIBUTING.md")


def main(arguments: list[str]) -> int:
    paths = [Path(each) for each in arguments]
    found = [each for path in paths or map(Path, PROSE) for each in plain_english.breaches(path)]
    package = Path("ravnest")
    for each in (*sizes.breaches(package), *repetition.breaches(package)):
        if not paths or any(each.path.is_relative_to(path) for path in paths):
            found.append(each)
    for each in found:
        print(each)
    print(f"{len(found)} places break the rules of the house" if found else "the rules of the house are kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
