"""Write README's tables, and draw the pictures in docs, from the stored results of a card.

    python bench/report.py                 README between its bench markers, and docs/speed-<card>.svg
    python bench/report.py --check         write nothing; exit 1 where README is out of date

Each kind of result that is stored for the card adds what its bench says (`harness.bench.Bench.readme`), one below the
other. The same results give the same bytes (of a picture: with one version of matplotlib, which is what
``pip install 'cupy-fa2[bench]'`` brings).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness.bench import Bench
from harness.machine import ROOT
from harness.results import RESULTS, read_result, slug, stored_path
from rows import BENCHES

__all__ = ["BEGIN", "END", "insert", "main"]

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def insert(readme: str, text: str) -> str:
    """README with `text` between its markers.

    Raises
    ------
    ValueError
        If the markers are not there, once each and in order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README must contain {BEGIN} and, after it, {END}, once each")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def stored_cards(folder: Path) -> list[str]:
    """Cards that have a result of any kind, by the names of their files."""
    names = [path.stem for path in folder.glob("*.json")]
    return sorted({name.removesuffix(f"-{kind}") for name in names for kind in BENCHES if name.endswith(f"-{kind}")})


def draw(bench: Bench, result: dict[str, Any]) -> bytes | None:
    """The picture of a kind, or None without matplotlib."""
    try:
        return bench.picture(result)
    except ImportError:
        print("no picture: pip install 'cupy-fa2[bench]' for matplotlib", file=sys.stderr)
        return None


def link(picture: Path, readme: Path) -> str:
    """Where the picture is, as README names it."""
    try:
        return picture.resolve().relative_to(readme.resolve().parent).as_posix()
    except ValueError:
        return picture.as_posix()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("card", nargs="?", help="such as 'NVIDIA H200' (default: the only one that has results)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--no-picture", action="store_true")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where README is out of date")
    options = parser.parse_args()
    cards = [slug(options.card)] if options.card else stored_cards(options.results)
    if len(cards) != 1:
        parser.error(f"name one of these cards: {', '.join(cards) or 'none has results'}")

    files: dict[Path, bytes] = {}
    sections = []
    for kind, bench in BENCHES.items():
        path = stored_path(cards[0], kind, options.results)
        if not path.exists():
            continue
        try:
            result = read_result(path)
        except ValueError as error:
            parser.error(str(error))
        if (result["kind"], slug(result["card"])) != (kind, cards[0]):
            parser.error(f"{path} is of {result['card']}, {result['kind']}")
        shown = None
        if bench.picture_name:
            picture = options.docs / f"{bench.picture_name}-{cards[0]}.svg"
            if not options.no_picture and not options.check and (drawn := draw(bench, result)):
                files[picture] = drawn
            if picture in files or picture.exists():
                shown = link(picture, options.readme)
        sections.append(bench.readme(result, shown))
    if not sections:
        parser.error(f"nothing is stored for {cards[0]} in {options.results}")

    text = "\n\n".join(filter(None, sections))
    try:
        files[options.readme] = insert(options.readme.read_text(), text).encode()
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        print(text)
        return 1
    stale = [file for file, content in files.items() if not file.exists() or file.read_bytes() != content]
    for file in stale:
        print(f"{'out of date' if options.check else 'written'}: {file}")
        if not options.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(files[file])
    if not stale:
        print("everything is up to date")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
