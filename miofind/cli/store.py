"""Options of commands that compile: a store of binaries that hosts share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import click

from miofind.compiler import BinaryCache
from miofind.errors import InvalidOptionError
from miofind.fleet.binary_store import BinaryStore, SharedCache, read_secret

F = TypeVar("F", bound=Callable[..., object])


def store_options(command: F) -> F:
    """--store and --store-secret."""
    url = click.option(
        "--store",
        metavar="URL",
        envvar="MIOFIND_STORE",
        help="Share binaries over a folder, https://... or s3://...; entries are signed.  [env: MIOFIND_STORE]",
    )
    secret = click.option(
        "--store-secret",
        metavar="FILE",
        envvar="MIOFIND_STORE_SECRET",
        help="File with the secret that entries are signed with.  [env: MIOFIND_STORE_SECRET]",
    )
    return url(secret(command))


def cache_over(store: str | None, secret: str | None) -> BinaryCache:
    """The user's cache, in front of the store where there is one.

    Raises:
        InvalidOptionError: a store without a secret, or one of them that cannot be used.
        MissingLibraryError: the library of the store's kind is not installed.
    """
    if not store:
        return BinaryCache()
    if not secret:
        made = os.path.join("~", ".config", "miofind", "store-secret")
        raise InvalidOptionError(
            f"--store needs --store-secret, a file that all hosts have: (umask 077; openssl rand -hex 32 > {made})"
        )
    if not os.path.exists(secret):
        raise InvalidOptionError(f"--store-secret {secret}: there is no such file: correct the path")
    return SharedCache(BinaryStore(store, read_secret(secret)))


def sharing(cache: BinaryCache) -> dict[str, int] | None:
    """How many binaries were taken from the store and given to it; None without one."""
    return {"fetched": cache.fetched, "published": cache.published} if isinstance(cache, SharedCache) else None
