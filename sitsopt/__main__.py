"""`python -m sitsopt`: the same as the `sitsopt` script."""

from sitsopt.cli.app import main

if __name__ == "__main__":
    main()
