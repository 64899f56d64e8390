"""Families of sealed images: what the ledger charges, whatever set an image is asked about in.

A family is opened by a query and grows: a later query that shares an image with it belongs to it, and brings its other
images along. One budget of R queries and B passes holds for the whole family, and the whole of it is retired together.
A query may touch one family that is still open. Images of other families, and of families that are retired, are left
out of it. So every query is asked about images of its own family, and of no other.

Why this is valid. Follow one family. Until its first pass every query of it was answered by the same bit, so which
models and which images its next query is about depends on the answers of other families alone, and those were given
by other images: none of this family's was ever in them. Given all that, its images are a fresh draw, and a model that
lost too much passes at the query's level at most. R queries at δ/R: a family gives a false certificate with a chance
of at most δ. (With B > 1 passes the level counts the histories of a family, as :class:`~holdfast.certify.ledger.Budget`
does.) A limit on the queries of each image alone is not enough: whoever may pool the images of several families whose
queries failed chooses images by their answers (``benchmarks/images.py`` shows both).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.files import fingerprint_ids, image_key

Images = Mapping[str, Sequence[str]]  # example id -> what the image is known by


def image_keys(*names: str) -> tuple[str, ...]:
    """Short keys of what an image is known by: the id of its file, the hash of its pixels."""
    return tuple(image_key(name) for name in dict.fromkeys(names) if name)


@dataclass(frozen=True)
class Family:
    """Images that share one budget."""

    fingerprint: str  # of the set that opened it, which its file is named by
    keys: frozenset[str]  # of every image that was ever in one of its queries
    sets: frozenset[str]  # fingerprints of the sets it was asked about
    retired: bool
    queries: int
    passes: int

    def overlap(self, fingerprint: str, images: Images) -> set[str]:
        """Ids of the images that are in it; of a family whose images are not on record all or none."""
        if fingerprint in self.sets:
            return set(images)
        return {identity for identity, keys in images.items() if not self.keys.isdisjoint(keys)}


@dataclass(frozen=True)
class Admitted:
    """Which of the images asked about may be queried, and why others may not."""

    ids: frozenset[str]
    family: str | None  # the family that the query belongs to; None: it opens one
    left_out: dict[str, str]  # id -> "spent", or "of another family"

    def counts(self) -> dict[str, int]:
        """How many are left out, by reason."""
        reasons = list(self.left_out.values())
        return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


SPENT, OTHER = "spent", "of another family"


def family_of(fingerprint: str, entries: Iterable[Mapping[str, Any]], retired: bool, passes: int) -> Family:
    """The family that a file of the ledger is about."""
    keys: set[str] = set()
    sets = {fingerprint}
    queries = 0
    for entry in entries:
        keys.update(str(entry.get("added", "")).split())
        sets.update(str(entry[name]) for name in ("set", "asked") if name in entry)
        queries = max(queries, int(entry.get("number", 0)))
    return Family(fingerprint, frozenset(keys), frozenset(sets), retired, queries, passes)


def admit(fingerprint: str, images: Images, families: Sequence[Family]) -> Admitted:
    """Leave out images of retired families, and of all open ones but that with the most images asked about."""
    shared = {family.fingerprint: family.overlap(fingerprint, images) for family in families}
    left_out: dict[str, str] = {}
    for family in families:
        if family.retired:
            left_out.update(dict.fromkeys(shared[family.fingerprint], SPENT))
    open_ones = {
        family.fingerprint: found
        for family in families
        if not family.retired and (found := shared[family.fingerprint] - left_out.keys())
    }
    chosen = max(sorted(open_ones), key=lambda name: len(open_ones[name]), default=None)
    for name, found in open_ones.items():
        if name != chosen:
            left_out.update(dict.fromkeys(found, OTHER))
    kept = frozenset(images) - left_out.keys()
    if chosen is not None and not open_ones[chosen] & kept:
        chosen = None
    return Admitted(kept, chosen, left_out)


def readmitted(entry: Mapping[str, Any], images: Images, family: str) -> Admitted:
    """The images of a query on record: it is made again with exactly those."""
    left = set(str(entry.get("left", "")).split())
    left_out = {identity: SPENT for identity, keys in images.items() if not left.isdisjoint(keys)}
    return Admitted(frozenset(images) - left_out.keys(), family, left_out)


def record_of(fingerprint: str, images: Images, admitted: Admitted, known: Collection[str]) -> dict[str, Any]:
    """What a query's entry says of its images: those that join the family now, and those that were left out."""
    added = {key for identity in admitted.ids for key in images[identity]} - set(known)
    left = {key for identity in admitted.left_out for key in images[identity]}
    record: dict[str, Any] = {"set": fingerprint_ids(admitted.ids), "images": len(admitted.ids)}
    if admitted.left_out:
        record |= {"asked": fingerprint, "left_out": admitted.counts(), "left": " ".join(sorted(left))}
    return {**record, "added": " ".join(sorted(added))}
