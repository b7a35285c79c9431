"""Makes ``bundled/kjv.txt`` from the output of Debian's ``bible`` program, for whoever wants to check where it came from.

    apt-get install bible-kjv
    bible -f Gen1:1-Rev22:21 </dev/null | python -m optimizer.data.bundled.make_text > optimizer/data/bundled/kjv.txt

One verse a line, one blank line between chapters, two between books, so that each book is one document.
"""

import re
import sys
from collections.abc import Iterable, Iterator

_VERSE = re.compile(r"(?P<book>[1-3]?[A-Za-z]+)(?P<chapter>\d+):(?P<verse>\d+) (?P<text>.+)")

_BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua",
    "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings", "2Ki": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job",
    "Psa": "Psalms", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk",
    "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark",
    "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon",
    "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John",
    "3Jn": "3 John", "Jude": "Jude", "Rev": "Revelation",
}  # fmt: skip


def format_text(lines: Iterable[str]) -> Iterator[str]:
    """Lines ``Ge1:1 In the beginning...`` in, lines of the bundled text out, without line ends."""
    book = chapter = ""
    for line in lines:
        match = _VERSE.fullmatch(line.rstrip())
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        if match["book"] != book:
            yield from ["", ""] if book else []
            book, chapter = match["book"], ""
            yield _BOOKS[book]
        if match["chapter"] != chapter:
            chapter = match["chapter"]
            yield ""
        yield f"{chapter}:{match['verse']} {' '.join(match['text'].split())}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in format_text(sys.stdin))
