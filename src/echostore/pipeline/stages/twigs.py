"""Twigs: how far each branch of a feed can be processed as far as the feed itself goes. HELD and NAMED in, TWIGS out.

Rows of `schemas.NAMED` were checked inside one piece. Here the pieces of a feed are walked in order with what the feed
last said about each other feed, so that a timeframe that goes backwards, or changes branch, from one piece to the next
is found too. Only the first and last entry of a row matter for that: a party has few rows, however many blocks it has.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

BACKWARDS, BRANCH = 0, 1


class Known(NamedTuple):
    """What a feed last said about another: the seq, and the twig it is in (None: not known, and not forked)."""

    seq: int
    twig: int | None


class Row(NamedTuple):
    """The ends of one row of `schemas.NAMED`."""

    names: bytes
    first_seq: int
    last_seq: int
    first_named: int
    last_named: int
    first_twig: int
    last_twig: int
    first_path: bytes | None
    fault: str | None


def walk_feed(
    held: list[dict[str, Any]], named: dict[int, list[Row]], asserted: Iterable[tuple[bytes, int]]
) -> Iterator[dict[str, Any]]:
    """The twigs of one feed, parents first. `asserted` is what the feed had said where an earlier commit ended."""
    by_twig: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(held, key=lambda row: row["start"]):
        by_twig.setdefault(row["twig"], []).append(row)
    knowing: dict[int | None, dict[bytes, Known]] = {None: {names: Known(seq, None) for names, seq in asserted}}
    for twig, pieces in by_twig.items():
        path = np.frombuffer(pieces[0]["path"], np.int64)
        parent = int(path[-2]) if len(path) > 1 else None
        known = knowing[twig] = dict(knowing[parent])
        cut, faults = None, b""
        for piece in pieces:
            cut, faults = _walk_piece(piece, named.get(piece["piece"], []), known)
            if cut is not None:
                break
        yield {
            "party": pieces[0]["party"],
            "feed": pieces[0]["feed"],
            "twig": twig,
            "parent": parent,
            "main": pieces[0]["main"],
            "start": pieces[0]["start"],
            "end": pieces[-1]["end"],
            "cut": pieces[-1]["end"] if cut is None else cut,
            "faults": faults,
        }


def _walk_piece(piece: dict[str, Any], rows: list[Row], known: dict[bytes, Known]) -> tuple[int | None, bytes]:
    """Where the piece stops for good, if it does, with what is wrong there across pieces; keeps `known` up to date."""
    if piece["old"]:
        # Delivered long ago: its rows only tell in which twig of a forked feed its last word was.
        for row in rows:
            known[row.names] = Known(row.last_named, row.last_twig if row.last_twig != -1 else None)
        return None, b""
    stops = [] if piece["bad_seq"] is None else [piece["bad_seq"]]
    wrong: list[tuple[int, bytes, int]] = []
    for row in sorted(rows, key=lambda row: (row.names, row.first_seq)):
        before = known.get(row.names)
        if before is not None:
            if row.first_named <= before.seq:
                wrong.append((row.first_seq, row.names, BACKWARDS))
            elif _changes_branch(before, row):
                wrong.append((row.first_seq, row.names, BRANCH))
        if row.fault is not None:
            stops.append(row.last_seq)
        known[row.names] = Known(row.last_named, row.last_twig)
    stops += [seq for seq, _, _ in wrong]
    if not stops or min(stops) >= piece["end"]:
        return None, b""
    cut = min(stops)
    return cut, b"".join(names + bytes([what]) for seq, names, what in wrong if seq == cut)


def _changes_branch(before: Known, row: Row) -> bool:
    if before.twig is None or before.twig == -1 or row.first_twig == -1 or row.first_path is None:
        return False
    return before.twig not in np.frombuffer(row.first_path, np.int64)
