"""What Alembic runs: the revisions, on the connection that `migrations.bring_up` has."""

from alembic import context

from miofind.finddb.migrations import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
