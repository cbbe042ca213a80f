"""Groups of commands with suggestions for mistyped names."""

from __future__ import annotations

import click

from miofind.errors import suggestion


class CommandGroup(click.Group):
    """A group; its error about an unknown command suggests the nearest names, else lists all."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = suggestion(args[0], known) or f". There are {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}{near}")
        return super().resolve_command(ctx, args)
