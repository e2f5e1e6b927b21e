"""`python -m tests.house [PATH …]`: what breaks the rules of the house; exit code 1 where anything does.

Without a path: the package, its pages and the README, and what the tests reach into.
"""

import sys
from itertools import chain
from pathlib import Path

from tests.house import plain_english, reaches, repetition, rooms, sizes

PROSE = ("ravnest", "docs", "README.md", "CONTRIBUTING.md")
PACKAGE, TESTS = Path("ravnest"), Path("tests")


def main(arguments: list[str]) -> int:
    paths = [Path(each) for each in arguments]
    prose = [path for path in paths if not path.is_relative_to(TESTS)] if paths else map(Path, PROSE)
    found = [each for path in prose for each in plain_english.breaches(path)]
    rules = sizes.breaches(PACKAGE), repetition.breaches(PACKAGE), rooms.breaches(PACKAGE), reaches.breaches(TESTS)
    for each in chain(*rules):
        if not paths or any(each.path.is_relative_to(path) for path in paths):
            found.append(each)
    for each in found:
        print(each)
    print(f"{len(found)} places break the rules of the house" if found else "the rules of the house are kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
