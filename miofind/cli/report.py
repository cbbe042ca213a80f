"""`miofind report`: results as one HTML page, and as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from miofind.cli.options import InputFile, OutputFile, db_option, example, json_option
from miofind.cli.output import bytes_text, print_json, print_text, stderr
from miofind.cli.session import verbose_option
from miofind.errors import InvalidOptionError, unwritable
from miofind.files import replacing
from miofind.finddb import is_of_database, user_path
from miofind.report.charts import require_libraries
from miofind.report.finddb_source import read_finddb
from miofind.report.page import page, picture
from miofind.report.results import SourceContent
from miofind.report.sources import checked_content, read_source


@click.command(
    epilog=example(
        "miofind report --output page.html",
        "miofind report tuned.db bench.json --output page.html --image roofline.svg",
    )
)
@click.argument("sources", nargs=-1, metavar="[SOURCE]...", type=InputFile())
@click.option("--output", metavar="FILE", type=OutputFile(), help="Write the page to this file.")
@click.option("--image", metavar="FILE.svg", type=OutputFile(), help="Write the rooflines to this file.")
@click.option("--title", default="miofind report", show_default=True, help="Heading of the page.")
@db_option(may_begin=False, about="FindDB to read.")
@json_option
@verbose_option
def report(
    sources: tuple[Path, ...], output: Path | None, image: Path | None, title: str, database: str | None, as_json: bool
) -> None:
    """Show results as one HTML page that needs no network.

    A SOURCE is a FindDB, or what `miofind bench --json` or `miofind tune --json` wrote; without one it is the FindDB of
    --db, or the user's. The page has a roofline, ratios by class, searches where a FindDB remembers them, and a table
    that sorts and filters. Needs the extra `report`.
    """
    targets = {option: path for option, path in (("--output", output), ("--image", image)) if path is not None}
    if not targets:
        raise click.UsageError("name what to write: --output page.html, --image roofline.svg or both")
    if Path("-") in targets.values():
        raise click.UsageError("a page and a picture are files: name one instead of -")
    if image is not None and image.suffix != ".svg":
        raise click.UsageError(f"--image {image} is no SVG: name a file that ends with .svg")
    for option, target in targets.items():
        _check_target(option, target, sources)
    require_libraries()
    with stderr().status("reading"):
        contents = _contents(sources, database)
    texts = {}
    if output is not None:
        texts["--output"] = page(contents, title)
    if image is not None:
        texts["--image"] = picture(contents)
    for option, text in texts.items():
        _write(option, targets[option], text)
    _tell(contents, targets, as_json=as_json)


def _contents(sources: tuple[Path, ...], database: str | None) -> list[SourceContent]:
    """What the sources hold, --db first."""
    read = [read_source(name) for name in dict.fromkeys(map(str, sources))]
    if database is None and sources:
        return read
    return [checked_content(read_finddb(database or user_path())), *read]


def _check_target(option: str, target: Path, sources: tuple[Path, ...]) -> None:
    """Refuse what must not be replaced: a database, or a source."""
    try:
        is_lost = is_of_database(target) or (target.exists() and any(map(target.samefile, sources)))
    except OSError as error:
        raise unwritable(f"{option} {target}", error) from error
    if is_lost:
        raise InvalidOptionError(f"{option} {target} is a database or a source, which would be lost: name another file")


def _write(option: str, target: Path, text: str) -> None:
    try:
        with replacing(target) as file:
            file.write(text)
    except OSError as error:
        raise unwritable(f"{option} {target}", error) from error


def _tell(contents: list[SourceContent], targets: dict[str, Path], *, as_json: bool) -> None:
    problems = sum(len(content.results) for content in contents)
    if as_json:
        named = {option.removeprefix("--"): str(target) for option, target in targets.items()}
        told = [{"source": one.name, "problems": len(one.results), "notes": list(one.notes)} for one in contents]
        print_json(named | {"problems": problems, "sources": told})
        return
    for content in contents:
        for note in content.notes:
            print_text(f"{content.name}: {note}")
    for target in targets.values():
        print_text(f"{target}: {problems} problems, {bytes_text(target.stat().st_size)}")
