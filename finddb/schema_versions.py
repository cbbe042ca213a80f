"""The versions of a FindDB's tables: what makes each the next, and what each is read as and written."""

from __future__ import annotations

from collections.abc import Mapping

from miofind.errors import DatabaseError, SchemaVersionError

SCHEMA_VERSION = 2
"""Of the files that are written to."""

PACKED_VERSION = 3
"""Of releases. It is one of the same count, so that older code refuses them, but no file is upgraded to it: the next
version of files that are written to is 4."""

UPGRADES: Mapping[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE measurement ADD COLUMN contended BOOLEAN DEFAULT '0' NOT NULL",
        "ALTER TABLE measurement ADD COLUMN dropped_samples BIGINT DEFAULT '0' NOT NULL",
        "CREATE TABLE verdict (problem_id INTEGER NOT NULL, id VARCHAR NOT NULL, winner TEXT NOT NULL, "
        "ties TEXT NOT NULL, comparisons TEXT NOT NULL, blocks BIGINT NOT NULL, protocol VARCHAR NOT NULL, "
        "environment VARCHAR NOT NULL, created_at VARCHAR NOT NULL, PRIMARY KEY (problem_id, id), "
        "FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE) WITHOUT ROWID",
    ),
}
"""Statements that make each version the next. They are history: what a release has run is never changed."""

OLDER_AS_THIS: Mapping[int, tuple[str, ...]] = {
    1: (
        "CREATE TEMP VIEW measurement AS SELECT *, 0 AS contended, 0 AS dropped_samples FROM main.measurement",
        "CREATE TEMP VIEW verdict AS SELECT 0 AS problem_id, '' AS id, '' AS winner, '' AS ties, '' AS comparisons, "
        "0 AS blocks, '' AS protocol, '' AS environment, '' AS created_at WHERE 0",
    ),
}
"""Statements that let a connection read each older version as if it were this one, with nothing written."""


def unwritable(where: str, version: int) -> DatabaseError:
    """Why nothing is written to a file of that version, and what to do; of this version only a mirror is only read."""
    if version == SCHEMA_VERSION:
        return DatabaseError(
            f"{where} mirrors a server and is only read: name it in MIOFIND_SYSTEM_DB, and record in a FindDB of your "
            "own"
        )
    if version == PACKED_VERSION:
        return DatabaseError(
            f"{where} is a release, which is only read: bring what it holds into a FindDB of your own with "
            "`miofind db merge`, and write to that"
        )
    return SchemaVersionError(
        f"{where} has schema version {version}, this release of miofind writes {SCHEMA_VERSION}: run "
        "`miofind db upgrade` on it, which keeps a backup"
    )
