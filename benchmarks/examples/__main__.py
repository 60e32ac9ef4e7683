"""Print the lines of code of every example, forge's and Lightning's.

python -m benchmarks.examples [--json]
"""

from __future__ import annotations

import argparse
import json

from benchmarks.examples import EXAMPLES, lines_of_code


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.examples", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    counts = {e.title: {"forge": lines_of_code(e.code), "lightning": lines_of_code(e.twin_code)} for e in EXAMPLES}
    if asked.json:
        print(json.dumps(counts))
        return
    for title, count in counts.items():
        print(f"{title:24} {count['forge']:4} {count['lightning']:4}")


if __name__ == "__main__":
    main()
