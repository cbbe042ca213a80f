"""MIOpen's texts: MIOpenDriver lines and find-db files."""
