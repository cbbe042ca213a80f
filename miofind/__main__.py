"""`python -m miofind`: the command line."""

from miofind.cli import main

if __name__ == "__main__":
    main()
