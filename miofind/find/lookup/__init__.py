"""Which rows of FindDBs answer a request, and which still hold."""
