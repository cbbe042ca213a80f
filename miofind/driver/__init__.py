"""Problems as words of a shell: MIOpenDriver lines and shapes."""
